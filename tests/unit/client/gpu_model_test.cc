// A model on a GPU is opened: windows, table, infos, refusals, and everything given back at the end.
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/client/gpu_fixture.h"

namespace moecached::client::test {
namespace {

class GpuModelTest : public GpuClientTest {};

TEST_F(GpuModelTest, EveryExpertIsReadThroughTheTable) {
  open_all();
  EXPECT_EQ(moecached_gpu_model_layers(model_), 3u);
  EXPECT_EQ(moecached_gpu_model_expert_used(model_), 4u);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 1u);
  EXPECT_EQ(layer(1).block, 2u);
  EXPECT_EQ(layer(1).n_slots, daemon_->gpu().host_first() + 16);
  EXPECT_TRUE(holds_all());
  daemon_->gpu().put(1, 3, 9);
  EXPECT_EQ(slot_of(1, 9), static_cast<std::int32_t>(daemon_->gpu().host_first() + 9));
  daemon_->gpu().set_entry(1, 9, 3);
  EXPECT_TRUE(holds(1, 9));
  daemon_->gpu().set_entry(1, 8, 3);
  EXPECT_FALSE(holds(1, 8)) << "the test can fail";
}

TEST_F(GpuModelTest, HostMemoryMayBeAMemfdBehindTheDevicesPart) {
  FakeGpuOptions options;
  options.memfd = true;
  open_all(options);
  daemon_->gpu().put(2, 5, 11);
  daemon_->gpu().set_entry(2, 11, 5);
  EXPECT_TRUE(holds_all());
  run_epoch(lane_);
}

// Memory of a second GPU, as the soft driver makes it.
UniqueFd memory_elsewhere() {
  UniqueFd memory(::memfd_create("soft-cuda-device-1", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(memory.get(), MOECACHED_PROBE_BYTES), 0);
  return memory;
}

TEST_F(GpuModelTest, TheDaemonIsToldWhetherMemoryOfOtherGpusCanBeMapped) {
  const UniqueFd probe = memory_elsewhere();
  FakeGpuOptions options;
  options.probe_fd = probe.get();
  open_all(options);
  EXPECT_EQ(daemon_->gpu_open_seen().flags, std::uint32_t{MOECACHED_GPU_OPEN_PEERS});
  close_all();
  ::setenv("SOFT_CUDA_NO_PEERS", "1", 1);
  open_all(options);
  ::unsetenv("SOFT_CUDA_NO_PEERS");
  EXPECT_EQ(daemon_->gpu_open_seen().flags, 0u);
  EXPECT_STRNE(daemon_->gpu_open_seen().no_peers_reason, "");
  close_all();
  ::setenv("MOECACHED_PEERS", "0", 1);
  open_all(options);
  ::unsetenv("MOECACHED_PEERS");
  EXPECT_EQ(daemon_->gpu_open_seen().flags, 0u);
  EXPECT_STREQ(daemon_->gpu_open_seen().no_peers_reason, "MOECACHED_PEERS is 0");
}

TEST_F(GpuModelTest, PartsAreFoundByName) {
  open_all();
  std::uint32_t l = 99, p = 99;
  ASSERT_EQ(moecached_gpu_model_find(model_, "blk.3.part_1.weight", &l, &p), MOECACHED_OK);
  EXPECT_EQ(l, 2u);
  EXPECT_EQ(p, 1u);
  EXPECT_EQ(moecached_gpu_model_find(model_, "blk.3.attn_q.weight", &l, &p), MOECACHED_E_ARGUMENT);
  moecached_part_info part{};
  std::uint64_t window = 0;
  ASSERT_EQ(moecached_gpu_model_part(model_, 2, 1, &part, &window), MOECACHED_OK);
  EXPECT_STREQ(part.name, "blk.3.part_1.weight");
  EXPECT_EQ(part.expert_bytes, 521u);
  EXPECT_EQ(part.slot_offset, 0u);
  EXPECT_EQ(window % kGranularity, 0u);
  EXPECT_EQ(moecached_gpu_model_part(model_, 3, 0, &part, &window), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_gpu_model_part(model_, 0, 3, &part, &window), MOECACHED_E_ARGUMENT);
}

TEST_F(GpuModelTest, TwoModelsShareTheSessionsRegistration) {
  open_all();
  moecached_gpu_model* second = nullptr;
  ASSERT_EQ(open_model(&second), MOECACHED_OK) << moecached_last_error();
  moecached_gpu_lane* lane = nullptr;
  ASSERT_EQ(moecached_gpu_lane_open(second, &lane), MOECACHED_OK) << moecached_last_error();
  run_epoch(lane);
  moecached_gpu_lane_close(lane);
  moecached_gpu_model_close(second);
  run_epoch(lane_);
  EXPECT_EQ(words().completed, 1u);
}

TEST_F(GpuModelTest, AGpuThatTheDaemonDoesNotServeIsRefused) {
  FakeGpuOptions other;
  other.uuid[15] = 9;
  start_daemon(other);
  ASSERT_EQ(open_session(), MOECACHED_OK);
  EXPECT_EQ(open_model(&model_), MOECACHED_E_REFUSED);
  EXPECT_EQ(model_, nullptr);
  EXPECT_EQ(moecached_session_connected(session_), 1);
}

TEST_F(GpuModelTest, AGpuThatThisProcessDoesNotSeeIsAnArgumentError) {
  start_daemon();
  ASSERT_EQ(open_session(), MOECACHED_OK);
  const std::uint8_t unknown[16] = {1};
  const char* path = model_file_.paths()[0].c_str();
  EXPECT_EQ(moecached_gpu_model_open(session_, &path, 1, unknown, &model_), MOECACHED_E_ARGUMENT);
}

TEST_F(GpuModelTest, FailuresOfTheDriverWhileOpeningGiveEverythingBack) {
  for (const char* function : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess",
                               "cuMemAddressReserve", "cuMemHostRegister", "cuDevicePrimaryCtxRetain"}) {
    start_daemon();
    ASSERT_EQ(open_session(), MOECACHED_OK);
    cuda_.fail_next(function, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(open_model(&model_), MOECACHED_E_SYSTEM) << function;
    EXPECT_NE(std::string(moecached_last_error()).find("out of memory"), std::string::npos)
        << moecached_last_error();
    EXPECT_EQ(cuda_.objects(), 0u) << function;
    close_all();
  }
}

TEST_F(GpuModelTest, WrongSizesAreRefused) {
  for (const bool memfd : {false, true}) {
    FakeGpuOptions options;
    options.memfd = memfd;
    options.spoil_opened = [](moecached_handle_gpu_opened& message) { message.host_memory = 3; };
    start_daemon(options);
    ASSERT_EQ(open_session(), MOECACHED_OK);
    EXPECT_EQ(open_model(&model_), MOECACHED_E_VERSION);
    close_all();
    options.spoil_opened = [](moecached_handle_gpu_opened& message) { message.log_bytes += 4096; };
    start_daemon(options);
    ASSERT_EQ(open_session(), MOECACHED_OK);
    EXPECT_EQ(open_model(&model_), MOECACHED_E_VERSION);
    close_all();
  }
}

}  // namespace
}  // namespace moecached::client::test
