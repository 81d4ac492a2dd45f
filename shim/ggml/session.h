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

#include "ggml-backend.h"
#include "moecached/moecached.h"

namespace moecached::shim {

class GpuExperts;
class Model;
class SpillExperts;

// What the plugin itself counts; the client counts the rest per model.
struct GraphCounters {
  std::atomic<uint64_t> graphs{0};      // graphs with experts of ours
  std::atomic<uint64_t> cut_layers{0};  // layers that needed more experts than they have slots
  std::atomic<uint64_t> waves{0};       // stream reads for those
  // On GPUs, where `graphs` counts the rewritten ones.
  std::atomic<uint64_t> gpu_computes{0};  // all graphs that a hooked backend was given
  std::atomic<uint64_t> gpu_plans{0};    // graphs that were looked through: new, changed, or without a number
  std::atomic<uint64_t> gpu_fetches{0};  // fetch kernels launched or captured
  std::atomic<uint64_t> gpu_waits{0};    // layers of models that spill for which the GPU waited, not the host
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
  // The GPU that models are opened on when they are loaded, from now on. Without it, or with nullptr, experts
  // are served on the CPU.
  void use_gpu(ggml_backend_dev_t device) { gpu_.store(device, std::memory_order_relaxed); }
  bool on_gpu() const { return gpu_.load(std::memory_order_relaxed) != nullptr; }
  // The same as model() for GPUs. A file that was refused once is not tried again: the daemon would lay it
  // out for each tensor anew.
  std::shared_ptr<GpuExperts> gpu_experts(const std::string& path);
  // The same for a model that is to spill, because RAM is not to hold all of it; nullptr for others.
  std::shared_ptr<SpillExperts> spill_experts(const std::string& path);
  // Whether any has been opened by now. Cheap.
  bool has_spilled() const { return has_spilled_.load(std::memory_order_relaxed); }
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
  template <typename T>
  struct Open {
    std::string key;  // identity of the file
    std::weak_ptr<T> model;
  };
  std::vector<Open<Model>> models_;
  std::vector<Open<GpuExperts>> gpu_experts_;
  std::vector<Open<SpillExperts>> spill_experts_;
  std::vector<std::string> to_spill_;  // paths
  std::atomic<bool> has_spilled_{false};
  std::vector<std::string> refused_on_gpu_;  // paths, those to spill included
  std::atomic<ggml_backend_dev_t> gpu_{nullptr};
  // A lock of its own: a model may close while models_mutex_ is held.
  std::mutex closed_mutex_;
  moecached_counters closed_ = {};  // sums over models closed by now
  GraphCounters counters_;
  uint64_t graphs_written_ = 0;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_SESSION_H_
