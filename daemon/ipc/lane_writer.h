// The client's side of the lane protocol in proto/shm/layout.h, for lanes whose client is a stream of the
// daemon itself: epochs, records, waiting for a lease. The memory orders are the ones written down there; the
// core loop cannot tell such a lane from another process's. Thread: one at a time. Memory: borrows the
// session.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "daemon/ipc/session.h"
#include "proto/shm/layout.h"

namespace moecached {

class LaneWriter {
 public:
  // Lane 0 of a session in which the model is open.
  LaneWriter(Session& session, std::uint32_t model_id);
  void close();  // complete, and no lane any more

  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }
  // What was loaded after begin stays until the next begin or complete.
  void begin(std::uint32_t layer);
  void complete();

  struct Batch {
    std::uint32_t layer = 0;
    std::uint32_t n_tokens = 0;
    bool prefill = false;
  };
  // For displays: so many pairs of token and expert were looked up.
  void count_lookups(std::uint64_t n);
  // Never waits. Dropped, and counted, if the ring is full.
  void post_route(const Batch& batch, std::span<const std::uint16_t> ids);
  // REQUIRES: complete() was called. The next begin() is the leased epoch. Waits for the answer; nothing:
  // `gone`.
  [[nodiscard]] std::optional<moecached_grant_status> lease(const Batch& batch,
                                                            std::span<const std::uint16_t> ids,
                                                            const std::function<bool()>& gone);

 private:
  [[nodiscard]] bool has_room(std::size_t n_ids) const;
  void publish(const moecached_shm_record& as, std::span<const std::uint16_t> ids);

  Session& session_;
  moecached_shm_lane& words_;
  std::uint64_t epoch_ = 0;
  std::uint64_t head_ = 0;
  std::uint32_t lease_seq_ = 0;
};

}  // namespace moecached
