// GpuQueue over the soft driver, whose streams are done at once: what is shown is the queue's own order and
// accounting. That a flip is seen after the copies before it, on a GPU, is for tests/stress to show.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "tests/unit/platform/soft_gpu.h"

namespace moecached {
namespace {

class GpuQueueTest : public SoftGpuTest {
 protected:
  static constexpr std::uint64_t kBytes = 2 * kGranularity;

  void SetUp() override {
    SoftGpuTest::SetUp();
    range_ = backed_range(kBytes);
    host_ = host_memory(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) host_->bytes()[i] = static_cast<std::byte>(i * 131 + i / 251);
    auto queue = gpu_->create_queue();
    ASSERT_TRUE(queue) << queue.error().text;
    queue_ = *std::move(queue);
  }
  void TearDown() override {
    queue_.reset();
    host_.reset();
    range_.reset();
    SoftGpuTest::TearDown();
  }

  [[nodiscard]] GpuQueue::Copy copy(std::uint64_t offset, std::uint64_t bytes) const {
    return {
        .destination = range_->address() + offset, .source = host_->bytes().data() + offset, .bytes = bytes};
  }
  [[nodiscard]] GpuQueue::Job copy_job(std::uint64_t tag,
                                       std::initializer_list<GpuQueue::Copy> copies) const {
    GpuQueue::Job job;
    job.tag = tag;
    for (const GpuQueue::Copy& each : copies) job.copies[job.n_copies++] = each;
    return job;
  }
  [[nodiscard]] GpuQueue::Job flip_job(std::uint64_t tag, std::uint64_t offset, std::int32_t value) const {
    GpuQueue::Job job;
    job.tag = tag;
    job.is_flip = true;
    job.flip = {.address = range_->address() + offset, .value = value};
    return job;
  }
  static GpuQueue::Job call_job(std::uint64_t tag, std::function<void()> call) {
    GpuQueue::Job job;
    job.tag = tag;
    job.call = std::move(call);
    return job;
  }
  [[nodiscard]] bool has_landed(std::uint64_t offset, std::uint64_t bytes) const {
    return std::memcmp(device(range_->address() + offset), host_->bytes().data() + offset, bytes) == 0;
  }
  [[nodiscard]] std::int32_t entry(std::uint64_t offset) const {
    return __atomic_load_n(reinterpret_cast<std::int32_t*>(device(range_->address() + offset)),
                           __ATOMIC_ACQUIRE);
  }
  // The next n completions, in order, as the core loop gets them: by the descriptor.
  std::vector<GpuQueue::Done> next(std::size_t n) {
    std::vector<GpuQueue::Done> done;
    while (done.size() < n) {
      pollfd ready{.fd = queue_->event_fd(), .events = POLLIN, .revents = 0};
      if (::poll(&ready, 1, 20'000) != 1) {
        ADD_FAILURE() << "only " << done.size() << " of " << n << " jobs were reported";
        return done;
      }
      queue_->poll(&done);
    }
    EXPECT_EQ(done.size(), n) << "a job was reported twice";
    return done;
  }

  std::unique_ptr<GpuRange> range_;
  std::unique_ptr<GpuHostMemory> host_;
  std::unique_ptr<GpuQueue> queue_;
};

TEST_F(GpuQueueTest, EveryCopyOfAJobHasLandedWhenItIsReported) {
  queue_->submit(copy_job(42, {copy(0, 1000), copy(5000, 1), copy(kGranularity, kGranularity)}));
  const auto done = next(1);
  EXPECT_EQ(done[0].tag, 42u);
  EXPECT_TRUE(done[0].ok);
  EXPECT_TRUE(has_landed(0, 1000));
  EXPECT_TRUE(has_landed(5000, 1));
  EXPECT_TRUE(has_landed(kGranularity, kGranularity));
  EXPECT_EQ(*device(range_->address() + 1000), std::byte{0}) << "and nothing else";
}

TEST_F(GpuQueueTest, TakesAsManyCopiesAJobAsALayerMayHaveParts) {
  GpuQueue::Job job;
  job.n_copies = GpuQueue::kCopiesMax;
  for (std::uint32_t i = 0; i < job.n_copies; ++i) job.copies[i] = copy(i * 4096, 4096);
  queue_->submit(std::move(job));
  EXPECT_TRUE(next(1)[0].ok);
  EXPECT_TRUE(has_landed(0, GpuQueue::kCopiesMax * 4096));
}

TEST_F(GpuQueueTest, CopiesOfManyJobsAreReportedOnceEachAndHaveLandedThen) {
  constexpr std::uint64_t kJobs = 500, kEach = kBytes / kJobs;
  for (std::uint64_t i = 0; i < kJobs; ++i) queue_->submit(copy_job(i, {copy(i * kEach, kEach)}));
  std::vector<int> reports(kJobs);
  std::vector<GpuQueue::Done> done;
  for (std::size_t n_reported = 0; n_reported < kJobs; n_reported += done.size()) {
    pollfd ready{.fd = queue_->event_fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
    done.clear();
    queue_->poll(&done);
    for (const GpuQueue::Done& each : done) {
      EXPECT_TRUE(each.ok);
      EXPECT_TRUE(has_landed(each.tag * kEach, kEach)) << each.tag;
      ++reports[each.tag];
    }
  }
  EXPECT_EQ(reports, std::vector<int>(kJobs, 1));
}

TEST_F(GpuQueueTest, CopyJobsThatWaitGoOutTogether) {
  const std::string calls = cuda_.calls_of([&] {
    std::promise<void> released;
    queue_->submit(call_job(1, [&] { released.get_future().wait(); }));
    for (std::uint64_t tag = 2; tag < 32; ++tag)
      queue_->submit(copy_job(tag, {copy(tag * 4096, 64), copy(tag * 4096 + 64, 64)}));
    queue_->submit(flip_job(32, 0, 5));
    queue_->submit(copy_job(33, {copy(4096, 64)}));
    released.set_value();
    EXPECT_EQ(next(33).size(), 33u);
  });
  std::size_t batches = 0;
  for (std::size_t at = calls.find("cuMemcpyBatchAsync"); at != calls.npos;
       at = calls.find("cuMemcpyBatchAsync", at + 1))
    ++batches;
  EXPECT_GE(batches, 2u) << "48 copies at most in one";
  EXPECT_LE(batches, 4u) << "the call may end before all jobs are queued";
  for (std::uint64_t tag = 2; tag < 32; ++tag) EXPECT_TRUE(has_landed(tag * 4096, 128)) << tag;
  EXPECT_EQ(entry(0), 5);
}

TEST_F(GpuQueueTest, CopiesOneByOneWhereTheDriverTakesNoBatch) {
  cuda_.fail_next("cuMemcpyBatchAsync", CUDA_ERROR_NOT_SUPPORTED);
  queue_->submit(copy_job(1, {copy(0, 5000), copy(65536, 100)}));
  EXPECT_TRUE(next(1)[0].ok);
  EXPECT_TRUE(has_landed(0, 5000));
  EXPECT_TRUE(has_landed(65536, 100));
}

TEST_F(GpuQueueTest, AFlipIsThereWhenItIsReportedAndTheLastOfOneEntryWins) {
  queue_->submit(flip_job(1, 64, 17));
  EXPECT_EQ(next(1)[0].tag, 1u);
  EXPECT_EQ(entry(64), 17);
  EXPECT_EQ(entry(60), 0);
  EXPECT_EQ(entry(68), 0);
  for (std::int32_t i = 0; i < 200; ++i)
    queue_->submit(flip_job(100 + static_cast<std::uint64_t>(i), 64, -i));
  (void)next(200);
  EXPECT_EQ(entry(64), -199);
}

TEST_F(GpuQueueTest, FlipsAndCallsAreDoneInTheirOrder) {
  std::vector<int> ran;  // the queue's thread writes, its reports order that before our read
  for (std::uint64_t i = 0; i < 100; ++i) {
    queue_->submit(flip_job(2 * i, 4 * i, static_cast<std::int32_t>(i)));
    queue_->submit(call_job(2 * i + 1, [&ran, i] { ran.push_back(static_cast<int>(i)); }));
  }
  std::uint64_t flips = 0, calls = 0;
  for (const GpuQueue::Done& done : next(200)) {
    EXPECT_TRUE(done.ok);
    std::uint64_t& expected = done.tag % 2 == 0 ? flips : calls;
    EXPECT_EQ(done.tag / 2, expected++);
  }
  ASSERT_EQ(ran.size(), 100u);
  EXPECT_TRUE(std::ranges::is_sorted(ran));
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(entry(4 * i), static_cast<std::int32_t>(i));
}

TEST_F(GpuQueueTest, ACallRunsOnAnotherThreadWithTheContextOfTheGpu) {
  std::thread::id thread;
  CUcontext context = nullptr;
  queue_->submit(call_job(5, [&] {
    thread = std::this_thread::get_id();
    context = cuda_.current();
  }));
  EXPECT_EQ(next(1)[0].tag, 5u);
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_NE(context, nullptr);
  EXPECT_EQ(cuda_.current(), nullptr);
}

TEST_F(GpuQueueTest, NothingIsReportedWhileACallRunsAndTheDescriptorIsQuiet) {
  std::promise<void> started, released;
  queue_->submit(call_job(1, [&] {
    started.set_value();
    released.get_future().wait();
  }));
  started.get_future().wait();
  queue_->submit(flip_job(2, 0, 3));
  std::vector<GpuQueue::Done> done;
  queue_->poll(&done);
  EXPECT_TRUE(done.empty());
  pollfd ready{.fd = queue_->event_fd(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&ready, 1, 0), 0);
  EXPECT_EQ(entry(0), 0);
  released.set_value();
  EXPECT_EQ(next(2).size(), 2u);
  EXPECT_EQ(::poll(&ready, 1, 0), 0) << "poll has taken everything";
  EXPECT_EQ(entry(0), 3);
}

TEST_F(GpuQueueTest, RoomIsWhatIsNotYetTakenByPoll) {
  const std::size_t room = queue_->room();
  EXPECT_GE(room, 1000u);
  for (std::uint64_t i = 0; i < 10; ++i) queue_->submit(flip_job(i, 0, 1));
  EXPECT_EQ(queue_->room(), room - 10);
  (void)next(10);
  EXPECT_EQ(queue_->room(), room);
}

TEST_F(GpuQueueTest, ACopyThatIsNotReadyIsAskedForAgainAndItsTimeCounted) {
  EXPECT_EQ(queue_->copy_ns(), 0u);
  cuda_.fail_next("cuEventQuery", CUDA_ERROR_NOT_READY);
  queue_->submit(copy_job(1, {copy(0, 64)}));
  EXPECT_TRUE(next(1)[0].ok);
  // The count is brought up to date when the queue's thread comes round again, before it takes the next job.
  queue_->submit(call_job(2, [] {}));
  (void)next(1);
  EXPECT_GT(queue_->copy_ns(), 0u);
}

TEST_F(GpuQueueTest, FlipsAloneAreNoCopyTime) {
  cuda_.fail_next("cuEventQuery", CUDA_ERROR_NOT_READY);
  queue_->submit(flip_job(1, 0, 1));
  (void)next(1);
  queue_->submit(call_job(2, [] {}));
  (void)next(1);
  EXPECT_EQ(queue_->copy_ns(), 0u);
}

TEST_F(GpuQueueTest, AFailureIsReportedAndNothingSucceedsAfterIt) {
  for (const char* function : {"cuMemcpyBatchAsync", "cuEventRecord", "cuEventCreate", "cuEventQuery"}) {
    auto queue = gpu_->create_queue();
    ASSERT_TRUE(queue);
    queue_ = *std::move(queue);
    cuda_.fail_next(function, CUDA_ERROR_ILLEGAL_ADDRESS);
    queue_->submit(copy_job(1, {copy(0, 64)}));
    EXPECT_FALSE(next(1)[0].ok) << function;
    queue_->submit(copy_job(2, {copy(4096, 64)}));
    queue_->submit(flip_job(3, 8192, 5));
    for (const GpuQueue::Done& done : next(2)) EXPECT_FALSE(done.ok) << function << ", job " << done.tag;
    EXPECT_EQ(entry(8192), 0) << function << ": an entry named a slot whose copy may not have arrived";
  }
}

TEST_F(GpuQueueTest, AFlipThatFailsIsALossToo) {
  cuda_.fail_next("cuStreamWriteValue32", CUDA_ERROR_ILLEGAL_ADDRESS);
  queue_->submit(flip_job(1, 0, 5));
  EXPECT_FALSE(next(1)[0].ok);
  EXPECT_EQ(entry(0), 0);
  queue_->submit(copy_job(2, {copy(0, 64)}));
  EXPECT_FALSE(next(1)[0].ok);
}

TEST_F(GpuQueueTest, WhatIsUnderWayWhenTheGpuIsLostIsReportedAsFailed) {
  std::promise<void> released;
  queue_->submit(call_job(0, [&] { released.get_future().wait(); }));
  cuda_.fail_next("cuStreamWriteValue32", CUDA_ERROR_ILLEGAL_ADDRESS);
  for (std::uint64_t i = 1; i <= 20; ++i) queue_->submit(copy_job(i, {copy(i * 64, 64)}));
  queue_->submit(flip_job(21, 0, 1));
  released.set_value();
  std::vector<int> reports(22);
  for (const GpuQueue::Done& done : next(22)) ++reports[done.tag];
  EXPECT_EQ(reports, std::vector<int>(22, 1)) << "each job once, lost or not";
}

TEST_F(GpuQueueTest, CallsStillRunOnALostGpuSoThatTheirCallersAreNotLeftWaiting) {
  cuda_.fail_next("cuMemcpyAsync", CUDA_ERROR_ILLEGAL_ADDRESS);
  queue_->submit(copy_job(1, {copy(0, 64)}));
  (void)next(1);
  bool has_run = false;
  queue_->submit(call_job(2, [&] { has_run = true; }));
  EXPECT_EQ(next(1)[0].tag, 2u);
  EXPECT_TRUE(has_run);
}

TEST_F(GpuQueueTest, EndsWithJobsThatNobodyHasWaitedFor) {
  for (int round = 0; round < 20; ++round) {
    auto queue = gpu_->create_queue();
    ASSERT_TRUE(queue);
    queue_ = *std::move(queue);
    for (std::uint64_t i = 0; i < 50; ++i) queue_->submit(copy_job(i, {copy(i * 64, 64)}));
  }
}

TEST_F(GpuQueueTest, TwoQueuesOfOneGpuDoNotMeet) {
  auto other = gpu_->create_queue();
  ASSERT_TRUE(other);
  (*other)->submit(flip_job(7, 0, 7));
  queue_->submit(flip_job(8, 4, 8));
  EXPECT_EQ(next(1)[0].tag, 8u);
  std::swap(queue_, *other);
  EXPECT_EQ(next(1)[0].tag, 7u);
  std::swap(queue_, *other);
}

TEST_F(GpuQueueTest, AStreamThatCannotBeMadeIsAFault) {
  cuda_.fail_next("cuStreamCreateWithPriority", CUDA_ERROR_OUT_OF_MEMORY);
  const auto queue = gpu_->create_queue();
  ASSERT_FALSE(queue);
  EXPECT_EQ(queue.error().code, FaultCode::kLimit);
}

}  // namespace
}  // namespace moecached
