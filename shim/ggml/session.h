// The plugin's one session with the daemon, and the counters of everything that ran through it.
//
// Reconnecting moves windows, so it must not happen while any graph uses them: each graph holds `graphs()`
// shared, a reconnect takes it whole. Thread: any. Memory: lives until the process ends; host programs tear
// down in any order.
#ifndef MOECACHED_SHIM_GGML_SESSION_H_
#define MOECACHED_SHIM_GGML_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "moecached/moecached.h"

namespace moecached::shim {

class Model;

// What the plugin itself counts; the client counts the rest per model.
struct GraphCounters {
  std::atomic<uint64_t> graphs{0};      // graphs with experts of ours
  std::atomic<uint64_t> cut_layers{0};  // layers that needed more experts than they have slots
  std::atomic<uint64_t> waves{0};       // stream reads for those
};

class Session {
 public:
  static Session& instance();

  // Opens the session with the daemon, once. Returns "" or a sentence that says what to do.
  std::string open();

  // To be held shared while a graph runs.
  std::shared_mutex& graphs() { return graphs_; }
  // Tries to get back to a daemon when it went away, unless a graph is running. Cheap while connected.
  void before_graph();

  // The model in this file, opened at the first call; nullptr when the daemon will not serve it (the reason
  // has been said).
  std::shared_ptr<Model> model(const std::string& path);
  // Called by a model that is being closed.
  void absorb(const moecached_counters& counters);

  GraphCounters& counters() { return counters_; }
  // Appends a line to $MOECACHED_STATS_FILE if any graph has run since the last one.
  void write_stats();

 private:
  Session() = default;

  std::shared_mutex graphs_;
  std::mutex models_mutex_;
  moecached_session* session_ = nullptr;
  struct OpenModel {
    std::string key;  // identity of the file
    std::weak_ptr<Model> model;
  };
  std::vector<OpenModel> models_;
  // A lock of its own: a model may close while models_mutex_ is held.
  std::mutex closed_mutex_;
  moecached_counters closed_ = {};  // sums over models closed by now
  GraphCounters counters_;
  uint64_t graphs_written_ = 0;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_SESSION_H_
