// Reads with pread on a few threads, where the kernel or a container's seccomp profile refuses io_uring.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "daemon/tier/read_engine.h"

namespace moecached {
namespace {

constexpr std::uint32_t kThreadsMax = 16;

struct Task {
  EngineRead read;
  int fd = -1;
};

class PreadEngine final : public ReadEngine {
 public:
  explicit PreadEngine(std::uint32_t queue_depth)
      : depth_(std::min(queue_depth, kThreadsMax)), fds_(kMaxFiles, -1) {
    started_.reserve(depth_);
    tasks_.reserve(depth_);
    results_.reserve(depth_);
  }

  ~PreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  PreadEngine(const PreadEngine&) = delete;
  PreadEngine& operator=(const PreadEngine&) = delete;

  Status open() {
    try {
      for (std::uint32_t i = 0; i < depth_; ++i) {
        threads_.emplace_back([this] { work(); });
        ::pthread_setname_np(threads_.back().native_handle(), "moecached-read");
      }
    } catch (const std::system_error& error) {  // fewer threads than asked for will do, none will not
      if (threads_.empty()) return system_fault("starting a reading thread", error.code().value());
    }
    return ok();
  }

  std::string_view name() const override { return "pread"; }
  std::uint32_t depth_max() const override { return depth_; }
  void add_file(std::uint32_t file, int fd, bool) override { fds_[file] = fd; }
  void remove_file(std::uint32_t file) override { fds_[file] = -1; }
  bool can_register_memory() const override { return false; }
  Status register_memory(std::span<std::byte>) override {
    return Fault{FaultCode::kUnsupported, "pread has no registered buffers"};
  }
  void unregister_memory(std::span<std::byte>) override {}
  void start(const EngineRead& read) override { started_.push_back(Task{read, fds_[read.file]}); }

  std::size_t wait(std::span<EngineDone> done, bool block) override {
    std::unique_lock lock(mutex_);
    const std::size_t n_started = started_.size();
    tasks_.insert(tasks_.end(), started_.begin(), started_.end());
    started_.clear();
    if (n_started == 1) {
      work_.notify_one();
    } else if (n_started > 1) {
      work_.notify_all();
    }
    if (block) done_.wait(lock, [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    const std::size_t n = std::min(done.size(), results_.size());
    std::copy_n(results_.begin(), n, done.begin());
    results_.erase(results_.begin(), results_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (stop_) return;
      const Task task = tasks_.front();  // at most 16: moving them up costs nothing against a read
      tasks_.erase(tasks_.begin());
      lock.unlock();
      const ssize_t n =
          ::pread(task.fd, task.read.memory, task.read.bytes, static_cast<off_t>(task.read.offset));
      const auto result = static_cast<std::int32_t>(n < 0 ? -errno : n);
      lock.lock();
      results_.push_back(EngineDone{task.read.id, result});
      if (results_.size() == 1) done_.notify_one();
    }
  }

  const std::uint32_t depth_;
  std::vector<int> fds_;
  std::vector<Task> started_;  // the io thread's own, until it waits
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<Task> tasks_;  // under mutex_, as all below
  std::vector<EngineDone> results_;
  bool woken_ = false;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<ReadEngine>> make_pread_engine(std::uint32_t queue_depth) {
  auto engine = std::make_unique<PreadEngine>(queue_depth);
  if (Status status = engine->open(); !status) return std::move(status).error();
  return std::unique_ptr<ReadEngine>(std::move(engine));
}

}  // namespace moecached
