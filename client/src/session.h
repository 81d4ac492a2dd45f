// A session: the connection to a daemon, the models opened in it, their lanes, and the move to the next
// daemon. Models on GPUs ride along behind the seam of movable_model.h. Thread: any; one lock guards all of
// it. Lanes do their work without that lock, so the caller keeps them idle during reconnect(), as the C
// header says. Memory: owns models and lanes until they are closed. Fork: not supported. A child shares the
// lane words with its parent and would end its epochs; it must open a session of its own and leave this one
// alone, its close functions too (exec is fine: every descriptor is close-on-exec).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"
#include "client/src/lane.h"
#include "client/src/model.h"
#include "client/src/movable_model.h"

namespace moecached::client {

// Lets an attempt through at most every two seconds. Thread: under the session's lock. Times are given, not
// taken.
class RetryGate {
 public:
  using Time = std::chrono::steady_clock::time_point;
  [[nodiscard]] bool pass(Time now) {
    if (tried_ && now - last_ < std::chrono::seconds(2)) return false;
    tried_ = true;
    last_ = now;
    return true;
  }

 private:
  bool tried_ = false;
  Time last_{};
};

class Session {
 public:
  Session();
  // NULL arguments: see the C header.
  [[nodiscard]] static moecached_status open(const char* socket, const char* label,
                                             std::unique_ptr<Session>* out);

  [[nodiscard]] bool connected();
  [[nodiscard]] moecached_status reconnect();

  // gpu: of a model that spills; null: slots in RAM alone.
  [[nodiscard]] moecached_status open_model(std::span<const char* const> paths, const GpuUuid* gpu,
                                            Model** out);
  void close_model(Model* model);
  [[nodiscard]] moecached_status open_lane(Model& model, Lane** out);
  void close_lane(Model& model, Lane* lane);

  // Calls `look` with the model while nothing about it can change.
  template <typename Look>
  auto with(const Model& model, Look look) {
    const std::lock_guard lock(mutex_);
    return look(model);
  }
  [[nodiscard]] moecached_counters counters(const Model& model);

  ~Session();

  // What models on GPUs work with, under the session's lock: see locked().
  class Locked {
   public:
    [[nodiscard]] Connection& connection() { return *session_.connection_; }
    // Gives the session a model; remove() ends it.
    template <typename T>
    T* add(std::unique_ptr<T> model) {
      T* const added = model.get();
      session_.movables_.push_back(std::move(model));
      return added;
    }
    void remove(MovableModel* model);
    // Before lanes or models change: a move that was prepared for others does not fit any more.
    void drop_prepared_move();

   private:
    friend class Session;
    explicit Locked(Session& session) : session_(session) {}
    Session& session_;
  };
  template <typename Work>
  auto locked(Work work) {
    const std::lock_guard lock(mutex_);
    return work(Locked(*this));
  }

 private:
  struct Move;  // what reconnect() prepares before it changes anything

  moecached_status prepare(Move* move);
  moecached_status ready();
  void drop_prepared_move();
  void commit(Move& move);

  Connection::Options options_;
  std::mutex mutex_;
  std::unique_ptr<Connection> connection_;
  std::vector<std::unique_ptr<Model>> models_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<MovableModel>> movables_;
  std::unique_ptr<Move> prepared_;  // to a daemon that still loads: kept until the next attempt
  RetryGate gate_;
  std::uint64_t reconnects_ = 0;
};

}  // namespace moecached::client
