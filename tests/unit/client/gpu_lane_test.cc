// The protocol of a lane on a GPU, step by step.
#include <atomic>
#include <thread>

#include "tests/unit/client/gpu_fixture.h"

namespace moecached::client::test {
namespace {

using Rows = std::vector<std::vector<std::int32_t>>;

class GpuLaneTest : public GpuClientTest {
 protected:
  // Values that say where they stand: 1000 * layer + position.
  [[nodiscard]] static Rows rows(std::uint32_t n_layers, std::uint32_t n_tokens) {
    Rows all(n_layers);
    for (std::uint32_t l = 0; l < n_layers; ++l) {
      for (std::uint32_t i = 0; i < n_tokens * 4; ++i)
        all[l].push_back(static_cast<std::int32_t>(1000 * l + i));
    }
    return all;
  }
};

TEST_F(GpuLaneTest, BeginNamesAllLayersAndCallsNothing) {
  open_all();
  run_epoch(lane_);
  const std::string calls = cuda_.calls_of([&] { ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK); });
  EXPECT_EQ(calls, "");
  EXPECT_EQ(words().begun, std::uint64_t{2} << 16 | MOECACHED_LAYER_ALL);
  EXPECT_EQ(words().completed, 1u);
  EXPECT_EQ(words().model_id, kGpuModelId);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
  EXPECT_EQ(words().completed, 2u);
}

TEST_F(GpuLaneTest, SubmitLeavesEverythingToTheStreamInThisOrder) {
  open_all();
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  const std::string calls = cuda_.calls_of([&] { ASSERT_EQ(submit(lane_, rows(2, 1)), MOECACHED_OK); });
  EXPECT_EQ(calls,
            "cuCtxPushCurrent\ncuStreamWaitEvent\ncuMemcpy2DAsync\ncuEventRecord\ncuStreamWriteValue64\n"
            "cuCtxPopCurrent\n");
}

TEST_F(GpuLaneTest, TheLogHoldsTheSlotsOfEveryRow) {
  open_all();
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  ASSERT_EQ(submit(lane_, rows(3, 2), true), MOECACHED_OK) << moecached_last_error();
  const SeenLogEntry entry = daemon_->gpu().log_entry(0, 1);
  EXPECT_EQ(entry.header.epoch, 1u);
  EXPECT_EQ(entry.header.n_layers, 3u);
  EXPECT_EQ(entry.header.n_tokens, 2u);
  EXPECT_EQ(entry.header.n_tokens_all, 2u);
  EXPECT_EQ(entry.header.flags, std::uint32_t{MOECACHED_FLAG_PREFILL});
  EXPECT_EQ(entry.layers, (std::vector<std::uint16_t>{0, 1, 2}));
  EXPECT_EQ(entry.slots, rows(3, 2));
  EXPECT_EQ(words().lookups, 24u);
}

TEST_F(GpuLaneTest, TheLogHoldsTheLastTokensOfALargeBatch) {
  open_all();
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  const Rows all = rows(2, 100);
  ASSERT_EQ(submit(lane_, all), MOECACHED_OK);
  const SeenLogEntry entry = daemon_->gpu().log_entry(0, 1);
  EXPECT_EQ(entry.header.n_tokens, 32u);
  EXPECT_EQ(entry.header.n_tokens_all, 100u);
  EXPECT_EQ(entry.header.flags, 0u);
  for (std::uint32_t l = 0; l < 2; ++l) {
    EXPECT_EQ(entry.slots[l], std::vector<std::int32_t>(all[l].end() - 128, all[l].end()));
  }
  EXPECT_EQ(words().lookups, 800u);
}

TEST_F(GpuLaneTest, AnEntryThatWasNotDrainedIsNeverOverwritten) {
  open_all();  // 8 entries
  for (int i = 0; i < 8; ++i) run_epoch(lane_, rows(1, 1));
  EXPECT_EQ(words().dropped, 0u);
  run_epoch(lane_, rows(1, 2));
  EXPECT_EQ(words().dropped, 1u);
  EXPECT_EQ(words().completed, 9u) << "the epoch ends all the same";
  EXPECT_EQ(daemon_->gpu().log_entry(0, 1).header.epoch, 1u);
  daemon_->set_tail(0, 2);
  run_epoch(lane_, rows(1, 2));
  EXPECT_EQ(daemon_->gpu().log_entry(0, 10).header.epoch, 10u);
  run_epoch(lane_, rows(1, 2));
  EXPECT_EQ(words().dropped, 2u) << "entry 3 is still the daemon's";
}

TEST_F(GpuLaneTest, LanesHaveWordsAndLogsOfTheirOwn) {
  open_all();
  moecached_gpu_lane* const second = open_lane();
  run_epoch(lane_, rows(1, 1));
  run_epoch(second, rows(2, 1));
  run_epoch(second, rows(3, 1));
  EXPECT_EQ(words(0).completed, 1u);
  EXPECT_EQ(words(1).completed, 2u);
  EXPECT_EQ(daemon_->gpu().log_entry(0, 1).header.n_layers, 1u);
  EXPECT_EQ(daemon_->gpu().log_entry(1, 1).header.n_layers, 2u);
  EXPECT_EQ(daemon_->gpu().log_entry(1, 2).header.n_layers, 3u);
}

TEST_F(GpuLaneTest, WrongArgumentsChangeNothing) {
  open_all();
  EXPECT_EQ(submit(lane_, {}), MOECACHED_E_ARGUMENT) << "no epoch is begun";
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  EXPECT_EQ(submit(lane_, rows(4, 1)), MOECACHED_E_ARGUMENT);
  const std::uint16_t beyond = 3;
  std::int32_t slots[4] = {};
  moecached_gpu_submit request{};
  request.done_event = &event_;
  request.slots = reinterpret_cast<std::uint64_t>(slots);
  request.layers = &beyond;
  request.n_layers = 1;
  request.n_tokens = 1;
  EXPECT_EQ(moecached_gpu_lane_submit(lane_, &request), MOECACHED_E_ARGUMENT);
  request.n_layers = 0;
  request.done_event = nullptr;
  EXPECT_EQ(moecached_gpu_lane_submit(lane_, &request), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(words().completed, 0u);
  EXPECT_EQ(words().lookups, 0u);
  EXPECT_EQ(submit(lane_, rows(1, 1)), MOECACHED_OK);
}

TEST_F(GpuLaneTest, AFailureOfTheStreamIsASentenceAndEndsNoEpoch) {
  open_all();
  for (const char* function :
       {"cuStreamWaitEvent", "cuMemcpy2DAsync", "cuEventRecord", "cuStreamWriteValue64"}) {
    const std::uint64_t completed = words().completed;
    ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
    cuda_.fail_next(function, CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(submit(lane_, rows(1, 1)), MOECACHED_E_SYSTEM);
    EXPECT_NE(std::string(moecached_last_error()).find("illegal memory access"), std::string::npos);
    EXPECT_EQ(words().completed, completed) << function;
    EXPECT_EQ(cuda_.current(), nullptr);
  }
}

TEST_F(GpuLaneTest, NewChunksAreMappedBeforeTheEpochThatMayMeetThem) {
  open_all();
  run_epoch(lane_);
  moecached_part_info part{};
  std::uint64_t before = 0, after = 0;
  ASSERT_EQ(moecached_gpu_model_part(model_, 0, 0, &part, &before), MOECACHED_OK);
  FakeGpu& gpu = daemon_->gpu();
  gpu.add_chunk(0, 0);
  const std::uint32_t slot =
      gpu.add_chunk(0, 2);  // the smaller parts' slots of that number lie in their first chunks
  gpu.publish_chunks();
  const std::string calls = cuda_.calls_of([&] { ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK); });
  EXPECT_NE(calls.find("cuStreamSynchronize"), std::string::npos)
      << "completed is not written over the GPU's head";
  EXPECT_EQ(words().begun, std::uint64_t{3} << 16 | MOECACHED_LAYER_ALL) << "epoch 2 used nothing";
  EXPECT_EQ(words().completed, 2u);
  gpu.put(0, slot, 13);
  gpu.set_entry(0, 13, static_cast<std::int32_t>(slot));
  EXPECT_TRUE(holds(0, 13));
  ASSERT_EQ(moecached_gpu_model_part(model_, 0, 0, &part, &after), MOECACHED_OK);
  EXPECT_EQ(after, before);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 1u);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
  EXPECT_EQ(words().completed, 3u);
}

TEST_F(GpuLaneTest, AChunkThatCouldNotBeMappedIsMappedByTheNextBegin) {
  open_all();
  std::uint32_t part = 0;
  for (const char* function : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    daemon_->gpu().add_chunk(0, part++);
    daemon_->gpu().publish_chunks();
    cuda_.fail_next(function, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_E_SYSTEM) << function;
    EXPECT_EQ(words().begun >> 16, words().completed) << "no epoch has begun";
    run_epoch(lane_);
  }
}

TEST_F(GpuLaneTest, AnEpochLeftUnsubmittedIsWaitedForWithTheWholeContext) {
  open_all();
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);  // the caller's launch failed half-way
  daemon_->gpu().add_chunk(0, 0);
  daemon_->gpu().publish_chunks();
  const std::string calls = cuda_.calls_of([&] { ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK); });
  EXPECT_NE(calls.find("cuCtxSynchronize"), std::string::npos);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
}

TEST_F(GpuLaneTest, NewShapesMoveTheGenerationWithoutAWait) {
  open_all();
  daemon_->gpu().set_all_resident(1, 1);
  EXPECT_EQ(layer(1).all_resident, 0u) << "not before an epoch begins";
  const std::string calls = cuda_.calls_of([&] { ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK); });
  EXPECT_EQ(calls, "");
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u);
  EXPECT_EQ(layer(1).all_resident, 1u);
  EXPECT_EQ(layer(1).n_slots, 16u);
  EXPECT_EQ(layer(0).all_resident, 0u);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
  run_epoch(lane_);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u);
}

TEST_F(GpuLaneTest, BeginWaitsWhileTheDaemonLoads) {
  FakeGpuOptions options;
  options.load_state = MOECACHED_LOADING;
  open_all(options);
  std::atomic<int> status{-1};
  std::thread waits([&] { status = moecached_gpu_lane_begin(lane_); });
  while (words().completed < 1) std::this_thread::yield();  // it waits, and holds no epoch
  EXPECT_EQ(status.load(), -1);
  daemon_->gpu().set_load_state(MOECACHED_COVERED);
  waits.join();
  EXPECT_EQ(status.load(), MOECACHED_OK);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
  EXPECT_EQ(words().completed, 2u);
}

TEST_F(GpuLaneTest, AFileThatCannotBeReadEndsTheWait) {
  FakeGpuOptions options;
  options.load_state = MOECACHED_LOADING;
  open_all(options);
  std::thread fails([&] {
    while (words().completed < 1) std::this_thread::yield();
    daemon_->gpu().set_load_state(MOECACHED_LOAD_FAILED);
  });
  EXPECT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_E_IO);
  fails.join();
  EXPECT_EQ(words().begun >> 16, words().completed) << "no epoch has begun";
}

TEST_F(GpuLaneTest, ADaemonThatDiesWhileLoadingEndsTheWait) {
  FakeGpuOptions options;
  options.load_state = MOECACHED_LOADING;
  open_all(options);
  std::thread dies([&] {
    while (words().completed < 1) std::this_thread::yield();
    daemon_->hang_up();
  });
  EXPECT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_E_UNAVAILABLE);
  dies.join();
}

TEST_F(GpuLaneTest, ADaemonThatDiesBeforeItHandsOverMemoryLeavesNoEpoch) {
  FakeGpuOptions options;
  options.dies_on_chunk_fetch = true;
  open_all(options);
  run_epoch(lane_);
  daemon_->gpu().add_chunk(1, 1);
  daemon_->gpu().publish_chunks();
  EXPECT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_E_UNAVAILABLE);
  EXPECT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_E_UNAVAILABLE);
  EXPECT_EQ(words().begun >> 16, words().completed);
}

TEST_F(GpuLaneTest, AClosedLanesBlockGoesOnWithItsEpochs) {
  open_all();
  run_epoch(lane_);
  run_epoch(lane_);
  moecached_gpu_lane_close(lane_);
  lanes_.clear();
  EXPECT_EQ(words().state, 0u);
  lane_ = open_lane();
  run_epoch(lane_);
  EXPECT_EQ(words().completed, 3u);
}

TEST_F(GpuLaneTest, TheCallersContextStaysCurrent) {
  open_all();
  CUcontext own = nullptr;
  ASSERT_EQ(cuda_.get<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&own, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuda_.get<CUresult(CUcontext)>("cuCtxSetCurrent")(own), CUDA_SUCCESS);
  run_epoch(lane_, rows(1, 1));
  close_all();
  EXPECT_EQ(cuda_.current(), own);
  ASSERT_EQ(cuda_.get<CUresult(CUcontext)>("cuCtxSetCurrent")(nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuda_.get<CUresult(CUdevice)>("cuDevicePrimaryCtxRelease_v2")(0), CUDA_SUCCESS);
}

}  // namespace
}  // namespace moecached::client::test
