// The caller's side of the SSD tier: slots and rings (request_table.h), files, and the io thread (io_loop.h).
#include "daemon/tier/ssd_tier.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/eventfd.h"
#include "daemon/platform/file.h"
#include "daemon/tier/io_loop.h"
#include "daemon/tier/read_engine.h"
#include "daemon/tier/request_table.h"

namespace moecached {

void TierCounters::add_reason(const std::string& reason) {
  const std::lock_guard lock(reason_mutex);
  if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) reasons.push_back(reason);
}

namespace {

Status check_options(const SsdOptions& options) {
  const auto bad = [](const char* name, std::uint64_t value, std::uint64_t lowest, std::uint64_t highest) {
    return Fault{FaultCode::kInvalid, std::string("ssd ") + name + " is " + std::to_string(value) +
                                          ", and must be " + std::to_string(lowest) + " to " +
                                          std::to_string(highest)};
  };
  constexpr std::uint32_t kDepthMax = 1024;
  constexpr std::uint64_t kReadBytesMin = 4096, kReadBytesMax = 256u << 20;
  constexpr std::uint32_t kRequestsMax = 1u << 20;
  if (options.queue_depth < 1 || options.queue_depth > kDepthMax) {
    return bad("queue_depth", options.queue_depth, 1, kDepthMax);
  }
  if (options.max_read_bytes < kReadBytesMin || options.max_read_bytes > kReadBytesMax) {
    return bad("max_read_bytes", options.max_read_bytes, kReadBytesMin, kReadBytesMax);
  }
  if (options.max_requests < 1 || options.max_requests > kRequestsMax) {
    return bad("max_requests", options.max_requests, 1, kRequestsMax);
  }
  return ok();
}

class SsdTierImpl final : public SsdTier {
 public:
  SsdTierImpl(const SsdOptions& options, EventFd event)
      : options_(options),
        table_(options.max_requests),
        event_(std::move(event)),
        alignments_(kMaxFiles, kNoFile) {
    for (std::uint32_t slot = options.max_requests; slot-- > 0;) free_slots_.push_back(slot);
    for (std::uint32_t file = kMaxFiles; file-- > 0;) free_files_.push_back(file);
  }

  ~SsdTierImpl() override {
    if (!thread_.joinable()) return;
    if (loop_ != nullptr) on_io_thread([this] { loop_->stop(); });
    thread_.join();
  }
  SsdTierImpl(const SsdTierImpl&) = delete;
  SsdTierImpl& operator=(const SsdTierImpl&) = delete;

  // The engine lives and dies on the io thread: a ring may be used by the thread that made it alone.
  Status start(const EngineFactory& factory) {
    std::promise<Status> started;
    std::future<Status> outcome = started.get_future();
    try {
      thread_ = std::thread(
          [this, &factory, started = std::move(started)]() mutable { run(factory, std::move(started)); });
    } catch (const std::system_error& error) {
      return system_fault("starting the io thread", error.code().value());
    }
    return outcome.get();
  }

  Result<FileId> add_file(UniqueFd fd) override {
    if (free_files_.empty()) {
      return Fault{FaultCode::kLimit, "more than " + std::to_string(kMaxFiles) + " model files are open"};
    }
    const auto alignment_max =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(read_bytes_max(options_), kAlignmentMax));
    Result<ReadableFile> opened = open_for_reading(std::move(fd), options_.direct ? alignment_max : 0);
    if (!opened) return std::move(opened).error();
    const std::uint32_t file = free_files_.back();
    free_files_.pop_back();
    alignments_[file] = opened->direct_alignment;
    if (opened->direct_alignment == 0) {
      counters_.n_files_buffered.fetch_add(1);
      if (!opened->reason.empty()) counters_.add_reason(opened->reason);
    }
    on_io_thread([&] { loop_->add_file(file, std::move(opened).value()); });
    return FileId(file);
  }

  void remove_file(FileId file) override {
    CHECK(is_open(file));
    on_io_thread([&] { loop_->remove_file(file.value); });
    if (alignments_[file.value] == 0) counters_.n_files_buffered.fetch_sub(1);
    alignments_[file.value] = kNoFile;
    free_files_.push_back(file.value);
  }

  std::uint32_t direct_alignment(FileId file) const override {
    CHECK(is_open(file));
    return alignments_[file.value];
  }

  void register_region(std::span<std::byte> region) override {
    on_io_thread([&] { loop_->add_region(region, {}); });
  }
  void register_traded_region(std::span<std::byte> region, std::vector<SlotWindow> slots) override {
    on_io_thread([&] { loop_->add_region(region, std::move(slots)); });
  }
  void released(std::span<const std::byte> memory) override {
    on_io_thread([&] { loop_->released(memory); });
  }
  void unregister_region(std::span<std::byte> region) override {
    on_io_thread([&] { loop_->remove_region(region); });
  }

  std::size_t submit(std::span<const ReadRequest> requests) override {
    const std::size_t n = std::min(requests.size(), free_slots_.size());
    if (n == 0) return 0;
    const std::uint64_t now = monotonic_ns();
    for (const ReadRequest& request : requests.first(n)) {
      CHECK(request.n_parts <= kMaxPartReads);
      for (std::uint32_t part = 0; part < request.n_parts; ++part) CHECK(is_open(request.parts[part].file));
      const std::uint32_t slot = free_slots_.back();
      free_slots_.pop_back();
      table_.slots[slot].request = request;
      table_.slots[slot].submit_ns = now;
      table_.to_io.push(slot);
    }
    table_.to_io.publish();
    if (table_.io_sleeps.load(std::memory_order_seq_cst) && table_.io_sleeps.exchange(false))
      loop_->engine().wake();
    return n;
  }

  std::size_t poll(std::span<ReadDone> done) override {
    if (done.empty()) return 0;
    std::size_t n = take_done(done);
    if (n == done.size()) return n;  // there may be more: the event stays readable
    // Nothing left. Drain first and lower the flag then: the io thread signals anew only once it sees the
    // flag lowered, and what it published before that is found by the second look. (n == 0: the io thread's
    // signal may have come after its results had been taken.)
    if (n == 0 || table_.caller_signalled.load(std::memory_order_relaxed)) {
      event_.drain();
      table_.caller_signalled.exchange(false, std::memory_order_seq_cst);
      n += take_done(done.subspan(n));
      if (n == done.size() && !table_.to_caller.empty() && !table_.caller_signalled.exchange(true))
        event_.signal();
    }
    return n;
  }

  int event_fd() const override { return event_.fd(); }

  SsdStats stats() const override {
    SsdStats stats;
    stats.engine = engine_name_;
    stats.direct = options_.direct && counters_.n_files_buffered.load() == 0;
    stats.registered_buffers = counters_.registered_buffers.load();
    {
      const std::lock_guard lock(counters_.reason_mutex);
      for (const std::string& reason : counters_.reasons) {
        if (!stats.fallback_reason.empty()) stats.fallback_reason += "; ";
        stats.fallback_reason += reason;
      }
    }
    stats.requests = counters_.requests.load();
    stats.reads = counters_.reads.load();
    stats.bytes_wanted = counters_.bytes_wanted.load();
    stats.bytes_read = counters_.bytes_read.load();
    stats.errors = counters_.errors.load();
    stats.latency_ns_total = counters_.latency_ns_total.load();
    stats.latency_ns_max = counters_.latency_ns_max.load();
    stats.depth_max = counters_.depth_max.load();
    return stats;
  }

 private:
  static constexpr std::uint32_t kNoFile = ~0u;

  [[nodiscard]] bool is_open(FileId file) const {
    return file.value < kMaxFiles && alignments_[file.value] != kNoFile;
  }

  std::size_t take_done(std::span<ReadDone> done) {
    std::size_t n = 0;
    std::uint32_t slot = 0;
    while (n < done.size() && table_.to_caller.pop(slot)) {
      done[n++] = ReadDone{table_.slots[slot].request.tag, table_.slots[slot].result};
      free_slots_.push_back(slot);
    }
    return n;
  }

  void run(const EngineFactory& factory, std::promise<Status> started) {
    ::pthread_setname_np(::pthread_self(), "moecached-io");
    std::string why_not_better;
    Result<std::unique_ptr<ReadEngine>> engine = factory(options_, why_not_better);
    if (!engine) return started.set_value(std::move(engine).error());
    engine_name_ = (*engine)->name();
    if (!why_not_better.empty()) counters_.add_reason(why_not_better);
    IoLoop loop(options_, std::move(engine).value(), table_, counters_, event_);
    if (Status status = loop.open(); !status) return started.set_value(std::move(status));
    loop_ = &loop;
    started.set_value(ok());
    loop.run([this] { run_command(); });
  }

  // Rare, so a lock will do: runs on the io thread, and waits until it has. The lock is held across wake(),
  // so that the engine is still there, should the command be to stop.
  void on_io_thread(const std::function<void()>& command) {
    std::unique_lock lock(command_mutex_);
    command_ = &command;
    command_pending_.store(true, std::memory_order_release);
    loop_->engine().wake();
    command_done_.wait(lock, [this] { return command_ == nullptr; });
  }

  void run_command() {
    if (!command_pending_.load(std::memory_order_acquire)) return;
    {
      const std::lock_guard lock(command_mutex_);
      command_pending_.store(false, std::memory_order_relaxed);
      (*command_)();
      command_ = nullptr;
    }
    command_done_.notify_one();
  }

  const SsdOptions options_;
  RequestTable table_;
  TierCounters counters_;
  EventFd event_;
  std::string engine_name_;

  // The caller's own.
  std::vector<std::uint32_t> free_slots_;
  std::vector<std::uint32_t> free_files_;
  std::vector<std::uint32_t> alignments_;  // by file; kNoFile: not open

  std::atomic<bool> command_pending_{false};
  std::mutex command_mutex_;
  std::condition_variable command_done_;
  const std::function<void()>* command_ = nullptr;
  IoLoop* loop_ = nullptr;  // on the io thread's stack; set before start returns
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<ReadEngine>> make_engine(const SsdOptions& options, std::string& why_not_better) {
  if (options.engine == SsdEngine::kPread) return make_pread_engine(options.queue_depth);
  Result<std::unique_ptr<ReadEngine>> uring = make_uring_engine(options.queue_depth);
  if (uring || options.engine == SsdEngine::kIoUring) return uring;
  why_not_better =
      uring.error().text + ": the kernel (kernel.io_uring_disabled) or a seccomp profile refuses io_uring";
  return make_pread_engine(options.queue_depth);
}

Result<std::unique_ptr<SsdTier>> make_ssd_tier_over(const SsdOptions& options, const EngineFactory& factory) {
  if (Status status = check_options(options); !status) return std::move(status).error();
  Result<EventFd> event = EventFd::create();
  if (!event) return std::move(event).error();
  auto tier = std::make_unique<SsdTierImpl>(options, std::move(event).value());
  if (Status status = tier->start(factory); !status) return std::move(status).error();
  return std::unique_ptr<SsdTier>(std::move(tier));
}

Result<std::unique_ptr<SsdTier>> make_ssd_tier(const SsdOptions& options) {
  return make_ssd_tier_over(options, make_engine);
}

}  // namespace moecached
