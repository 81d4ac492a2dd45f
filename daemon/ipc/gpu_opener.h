// Makes models on GPUs on a thread of its own, one after the other: reading the header of a model and
// allocating pinned memory for all its experts takes seconds, in which the handle socket has others to
// answer. Thread: submit and take belong to the handle server. Memory: a result is kept until it is taken.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/ipc/core.h"
#include "daemon/ipc/gpu_model.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/gpu.h"
#include "daemon/platform/memfd.h"

namespace moecached {

class GpuOpener {
 public:
  struct Request {
    int connection = -1;  // comes back with the result
    SessionId session;
    std::vector<UniqueFd> shards;
    std::string name;
    GpuId gpu;
    bool spill = false;  // VRAM and RAM hold a part of it
    bool reads_peers = false;
    std::string no_peers_reason;
  };
  struct Opened {
    std::shared_ptr<GpuModel> model;
    std::shared_ptr<Memfd> log;
    UniqueFd table;
    // Of one that spills, instead:
    std::shared_ptr<SharedModel> spill;
    std::shared_ptr<Memfd> stream;
  };
  struct Done {
    int connection = -1;
    std::string name;
    GpuId gpu;
    Result<Opened> opened = Fault{};
  };
  // `wake` is called on this object's thread when take() has something.
  GpuOpener(const Config& config, Core& core, std::uint64_t boot_epoch, std::function<void()> wake);
  ~GpuOpener();  // waits for the model that is being made
  GpuOpener(const GpuOpener&) = delete;
  GpuOpener& operator=(const GpuOpener&) = delete;

  // A connection has at most one request at a time, so connections bound the queue.
  void submit(Request request);
  [[nodiscard]] std::vector<Done> take();
  // Any thread: on it, when no other model is being made.
  Result<std::shared_ptr<GpuModel>> make_now(std::vector<UniqueFd> shards, const GpuId& gpu);

 private:
  void run();
  Result<Opened> open(Request& request);
  Result<Opened> open_spill(Request& request);
  Result<Opened> prepare_spill(SessionId session, const std::shared_ptr<SharedModel>& model);
  Result<std::shared_ptr<GpuModel>> make_model(Request& request);

  const Config& config_;
  Core& core_;
  const std::uint64_t boot_epoch_;
  const std::function<void()> wake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  std::vector<Done> done_;
  bool stopping_ = false;
  std::mutex making_;   // one after the other: two of a model would be two copies of it
  std::thread thread_;  // last: everything it uses is there
};

}  // namespace moecached
