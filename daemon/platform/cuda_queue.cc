// One thread, two streams: one of copies, one of flips. Completion is looked for with events.
#include "daemon/platform/cuda_queue.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/platform/eventfd.h"

namespace moecached {
namespace {

class CudaQueue final : public GpuQueue {
 public:
  static Result<std::unique_ptr<GpuQueue>> create(CudaContextPtr context) {
    auto wake = EventFd::create();
    if (!wake) return std::move(wake).error();
    std::unique_ptr<CudaQueue> queue(new CudaQueue(std::move(context), *std::move(wake)));
    const CudaContext::Use use(*queue->context_);
    for (Lane& lane : queue->lanes_) {
      const CUresult result = queue->cu_.cuStreamCreateWithPriority(&lane.stream, CU_STREAM_NON_BLOCKING, 0);
      if (result != CUDA_SUCCESS) return queue->cu_.fault("creating a stream", result);
    }
    queue->thread_ = std::thread([raw = queue.get()] { raw->run(); });
    return std::unique_ptr<GpuQueue>(std::move(queue));
  }

  ~CudaQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
    const CudaContext::Use use(*context_);
    for (Lane& lane : lanes_) {
      if (lane.stream == nullptr) continue;
      cu_.cuStreamSynchronize(lane.stream);
      for (const InFlight& job : lane.in_flight) cu_.cuEventDestroy(job.event);
      cu_.cuStreamDestroy(lane.stream);
    }
    for (CUevent event : events_) cu_.cuEventDestroy(event);
  }

  void submit(Job job) override {
    ++outstanding_;
    CHECK(outstanding_ <= kOutstandingMax);
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }
  std::size_t room() const override { return kOutstandingMax - outstanding_; }
  void poll(std::vector<Done>* done) override {
    wake_.drain();
    const std::lock_guard lock(mutex_);
    outstanding_ -= done_.size();
    done->insert(done->end(), done_.begin(), done_.end());
    done_.clear();
  }
  int event_fd() const override { return wake_.fd(); }
  std::uint64_t copy_ns() const override { return copy_ns_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kOutstandingMax = 8192;
  static constexpr std::size_t kCopyLane = 0, kFlipLane = 1, kLanes = 2;
  // One batch is copied, the next one waits behind it; what comes meanwhile makes the next one larger.
  static constexpr std::size_t kBatchesInFlight = 2;
  // Measured on an H200, copies of 0.9 MB: 46 GB/s one by one, on 1 to 4 streams alike; in batches of 3, 12
  // and 48 copies 52, 54.5 and 55 GB/s; one large copy 55.3.
  static constexpr std::size_t kBatchCopies = 48;
  static constexpr std::uint64_t kBatchBytes = 48u << 20;  // what is in a batch is there when all of it is
  static_assert(kBatchCopies >= kCopiesMax);
  struct Batch {
    std::array<CUdeviceptr, kBatchCopies> destinations, sources;
    std::array<std::size_t, kBatchCopies> bytes;
    std::size_t count = 0;
    std::uint64_t total_bytes = 0;
  };
  // CUmemcpyAttributes, which headers before CUDA 12.8 do not have.
  struct BatchAttributes {
    int source_access_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    CUmemLocation source_hint{}, destination_hint{};
    unsigned flags = 0;
  };
  // Jobs of a batch share an event.
  struct InFlight {
    std::vector<std::uint64_t> tags;
    CUevent event;
  };
  struct Lane {
    CUstream stream = nullptr;
    std::deque<InFlight> in_flight;
  };

  CudaQueue(CudaContextPtr context, EventFd wake)
      : context_(std::move(context)), cu_(context_->cu), wake_(std::move(wake)) {}

  void run() {
    // Completions are looked for in short sleeps; the default slack of 50 us would be most of a copy.
    ::prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
    ::prctl(PR_SET_NAME, "gpu-copy", 0, 0, 0);
    const CudaContext::Use use(*context_);
    std::deque<Job> taken;
    std::vector<Done> finished;
    for (;;) {
      const bool busy = !waiting_.empty() ||
                        std::ranges::any_of(lanes_, [](const Lane& lane) { return !lane.in_flight.empty(); });
      count_copy_time();
      {
        std::unique_lock lock(mutex_);
        if (!busy) changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (stopping_) return;
        taken.swap(jobs_);
      }
      for (Job& job : taken) {
        if (job.call || job.is_flip) {
          start(job, &finished);
        } else {
          waiting_.push_back(std::move(job));
        }
      }
      taken.clear();
      while (!waiting_.empty() && lanes_[kCopyLane].in_flight.size() < kBatchesInFlight)
        start_batch(&finished);
      for (Lane& lane : lanes_) collect(lane, &finished);
      if (!finished.empty()) {
        {
          const std::lock_guard lock(mutex_);
          done_.insert(done_.end(), finished.begin(), finished.end());
        }
        finished.clear();
        wake_.signal();
      } else if (busy) {
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    }
  }

  void count_copy_time() {
    const bool copying = !lanes_[kCopyLane].in_flight.empty();
    const auto now = std::chrono::steady_clock::now();
    if (was_copying_) {
      const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now - counted_until_).count();
      copy_ns_.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
    }
    was_copying_ = copying;
    counted_until_ = now;
  }

  void start(Job& job, std::vector<Done>* finished) {
    if (job.call) {
      job.call();
      finished->push_back({job.tag, true});
      return;
    }
    Lane& lane = lanes_[kFlipLane];
    CUresult result = lost_ ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
      // The default flag: a system-wide fence comes before the write, so what earlier jobs copied is seen
      // first.
      result =
          cu_.cuStreamWriteValue32(lane.stream, job.flip.address, static_cast<cuuint32_t>(job.flip.value),
                                   CU_STREAM_WRITE_VALUE_DEFAULT);
    }
    record(lane, {job.tag}, result, finished);
  }

  // Starts the copies of the first waiting jobs, as many as fit into a batch.
  void start_batch(std::vector<Done>* finished) {
    batch_.count = 0;
    batch_.total_bytes = 0;
    std::vector<std::uint64_t> tags;
    while (!waiting_.empty()) {
      const Job& job = waiting_.front();
      if (!tags.empty() && (batch_.count + job.n_copies > kBatchCopies || batch_.total_bytes >= kBatchBytes))
        break;
      for (std::uint32_t i = 0; i < job.n_copies; ++i) {
        batch_.destinations[batch_.count] = job.copies[i].destination;
        batch_.sources[batch_.count] = reinterpret_cast<CUdeviceptr>(job.copies[i].source);
        batch_.bytes[batch_.count] = job.copies[i].bytes;
        batch_.total_bytes += job.copies[i].bytes;
        ++batch_.count;
      }
      tags.push_back(job.tag);
      waiting_.pop_front();
    }
    Lane& lane = lanes_[kCopyLane];
    record(lane, std::move(tags), lost_ ? CUDA_ERROR_UNKNOWN : copy(lane.stream), finished);
  }

  // Puts an event behind what was started, or reports that it failed.
  void record(Lane& lane, std::vector<std::uint64_t> tags, CUresult result, std::vector<Done>* finished) {
    CUevent event = nullptr;
    if (result == CUDA_SUCCESS) result = take_event(&event);
    if (result == CUDA_SUCCESS) result = cu_.cuEventRecord(event, lane.stream);
    if (result == CUDA_SUCCESS) {
      lane.in_flight.push_back({std::move(tags), event});
      return;
    }
    lost_ = true;
    if (event != nullptr) events_.push_back(event);
    for (const std::uint64_t tag : tags) finished->push_back({tag, false});
  }

  CUresult copy(CUstream stream) {
    if (cu_.cuMemcpyBatchAsync != nullptr && batch_.count > 0) {
      BatchAttributes attributes;
      std::size_t first = 0, failed = 0;
      const CUresult result =
          cu_.cuMemcpyBatchAsync(batch_.destinations.data(), batch_.sources.data(), batch_.bytes.data(),
                                 batch_.count, &attributes, &first, 1, &failed, stream);
      if (result != CUDA_ERROR_NOT_SUPPORTED) return result;
    }
    for (std::size_t i = 0; i < batch_.count; ++i) {
      const CUresult result =
          cu_.cuMemcpyAsync(batch_.destinations[i], batch_.sources[i], batch_.bytes[i], stream);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }

  void collect(Lane& lane, std::vector<Done>* finished) {
    while (!lane.in_flight.empty()) {
      const CUresult result = lost_ ? CUDA_ERROR_UNKNOWN : cu_.cuEventQuery(lane.in_flight.front().event);
      if (result == CUDA_ERROR_NOT_READY) return;
      const InFlight job = std::move(lane.in_flight.front());
      lane.in_flight.pop_front();
      events_.push_back(job.event);
      if (result != CUDA_SUCCESS) lost_ = true;
      for (const std::uint64_t tag : job.tags) finished->push_back({tag, result == CUDA_SUCCESS});
    }
  }

  CUresult take_event(CUevent* event) {
    if (events_.empty()) return cu_.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
    *event = events_.back();
    events_.pop_back();
    return CUDA_SUCCESS;
  }

  CudaContextPtr context_;
  const CudaDriver& cu_;
  EventFd wake_;
  std::size_t outstanding_ = 0;  // the submitter's
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<Done> done_;
  bool stopping_ = false;
  // The thread's own.
  std::array<Lane, kLanes> lanes_;
  std::deque<Job> waiting_;  // copies
  std::vector<CUevent> events_;
  Batch batch_;
  bool lost_ = false;
  bool was_copying_ = false;
  std::chrono::steady_clock::time_point counted_until_;
  std::atomic<std::uint64_t> copy_ns_{0};
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<GpuQueue>> create_cuda_queue(CudaContextPtr context) {
  return CudaQueue::create(std::move(context));
}

}  // namespace moecached
