// Scratch slots: where they lie, who gets them, and what a fetch puts there.
#include "client/src/scratch_plan.h"

#include "tests/unit/client/gpu_fixture.h"

namespace moecached::client::test {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// One layer a size of part: three parts each.
GpuLayout layout_of(const std::vector<std::uint64_t>& part_bytes, std::uint32_t n_expert_used,
                    std::uint32_t n_experts = 128) {
  GpuLayout layout;
  layout.gpu.granularity = kGranularity;
  layout.model.model.n_expert_used = n_expert_used;
  for (std::uint32_t l = 0; l < 2; ++l) {
    LayerLayout& layer = layout.model.layers.emplace_back();
    layer.layer.first_part = static_cast<std::uint32_t>(layout.windows.size());
    layer.layer.n_experts = n_experts;
    for (const std::uint64_t bytes : part_bytes) {
      moecached_shm_part& part = layer.parts.emplace_back();
      part.expert_bytes = bytes;
      moecached_shm_window& window = layout.windows.emplace_back();
      window.device_bytes = kGranularity * (bytes * n_experts / kGranularity + 1);
      window.host_bytes = window.device_bytes;
    }
  }
  return layout;
}

TEST(ScratchPlan, LiesBehindEveryWindowAtOneIdForAllParts) {
  const std::vector<std::uint64_t> parts = {884736, 884736, 1290240, 11520};
  const GpuLayout layout = layout_of(parts, 8);
  const ScratchPlan plan = plan_scratch(layout);
  ASSERT_EQ(plan.first.size(), 2u);
  EXPECT_GT(plan.n_slots, 0u);
  for (std::uint32_t l = 0; l < 2; ++l) {
    for (std::uint32_t p = 0; p < parts.size(); ++p) {
      const std::uint32_t part = layout.part_index(l, p);
      const std::uint64_t begin = plan.first[l] * parts[p];
      EXPECT_EQ(plan.offset[part] % kGranularity, 0u);
      EXPECT_LE(plan.offset[part], begin);
      EXPECT_GE(plan.offset[part], layout.windows[part].device_bytes + layout.windows[part].host_bytes)
          << "the host's memory is mapped up to there";
      EXPECT_EQ(plan.memory_bytes[p] % kGranularity, 0u);
      EXPECT_GE(plan.offset[part] + plan.memory_bytes[p], begin + plan.n_slots * parts[p] + 4096)
          << "kernels read past a row";
      EXPECT_GE(plan.window_bytes[part], plan.offset[part] + plan.memory_bytes[p]);
    }
  }
}

TEST(ScratchPlan, HoldsWholeTokensWithinItsMemory) {
  struct Case {
    std::uint64_t part_bytes;
    std::uint32_t n_expert_used, n_slots;
  };
  for (const Case& c : {Case{884736, 8, 32}, Case{16384, 8, 64}, Case{4406400, 4, 4}, Case{11 * kMiB, 2, 2},
                        Case{60 * kMiB, 2, 0}}) {
    const ScratchPlan plan =
        plan_scratch(layout_of({c.part_bytes, c.part_bytes, c.part_bytes}, c.n_expert_used, 8));
    EXPECT_EQ(plan.n_slots, c.n_slots) << c.part_bytes;
    std::uint64_t total = 0;
    for (const std::uint64_t bytes : plan.memory_bytes) total += bytes;
    EXPECT_LE(c.n_slots > c.n_expert_used ? total : 0, 96 * kMiB);
  }
}

TEST(ScratchPlan, HasNoneForExpertsThatAreNoWholeWords) {
  EXPECT_EQ(plan_scratch(layout_of({1000, 521}, 4)).n_slots, 0u);
}

class GpuScratchTest : public GpuClientTest {
 protected:
  GpuScratchTest() : GpuClientTest({.part_bytes = {1008, 524, 4128}}) {}

  [[nodiscard]] static std::uint32_t scratch_of(moecached_gpu_lane* lane) {
    std::uint32_t n_slots = 99;
    EXPECT_EQ(moecached_gpu_lane_scratch(lane, &n_slots), MOECACHED_OK) << moecached_last_error();
    return n_slots;
  }
  // Looks the experts up and fetches them; where to read each.
  [[nodiscard]] std::vector<std::int32_t> fetch(std::uint32_t index,
                                                const std::vector<std::uint32_t>& experts) {
    const bool by_expert = layer(index).by_expert != 0;
    slots_.clear();
    for (const std::uint32_t expert : experts)
      slots_.push_back(by_expert ? static_cast<std::int32_t>(expert) : slot_of(index, expert));
    std::vector<std::int32_t> fetched(experts.size(), -9);
    const moecached_gpu_fetch request = {&event_, reinterpret_cast<std::uint64_t>(slots_.data()),
                                         reinterpret_cast<std::uint64_t>(fetched.data()),
                                         static_cast<std::uint32_t>(experts.size()),
                                         index | (by_expert ? MOECACHED_GPU_BY_EXPERT : 0u)};
    EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &request), MOECACHED_OK) << moecached_last_error();
    return fetched;
  }
  [[nodiscard]] bool slot_is(std::uint32_t index, std::int32_t slot, std::uint32_t expert) const {
    if (slot < 0 || static_cast<std::uint32_t>(slot) >= layer(index).n_slots_fetched) return false;
    for (std::uint32_t p = 0; p < layer(index).n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      if (moecached_gpu_model_part(model_, index, p, &part, &window) != MOECACHED_OK) return false;
      const void* bytes =
          reinterpret_cast<const void*>(window + static_cast<std::uint64_t>(slot) * part.expert_bytes);
      if (!model_file_.part_is(index, p, expert, bytes)) return false;
    }
    return true;
  }

  std::vector<std::int32_t> slots_;
};

TEST_F(GpuScratchTest, HoldsWhatWasInRamAndLeavesTheRestWhereItIs) {
  open_all();
  EXPECT_EQ(layer(0).n_slots_fetched, 0u);
  ASSERT_EQ(scratch_of(lane_), 64u);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u) << "the infos have changed";
  daemon_->gpu().put(1, 3, 9);
  daemon_->gpu().set_entry(1, 9, 3);
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  const std::vector<std::uint32_t> experts = {9, 4, 11, 9, 4, 0};
  const std::vector<std::int32_t> fetched = fetch(1, experts);
  EXPECT_EQ(fetched[0], 3);
  EXPECT_EQ(fetched[3], 3);
  EXPECT_EQ(fetched[1], fetched[4]) << "copied once";
  for (const std::size_t i : {1u, 2u, 5u})
    EXPECT_GE(fetched[i], static_cast<std::int32_t>(layer(1).n_slots)) << "read in place";
  for (std::size_t i = 0; i < experts.size(); ++i) EXPECT_TRUE(slot_is(1, fetched[i], experts[i])) << i;
  EXPECT_FALSE(slot_is(1, fetched[1], 5)) << "the test can fail";
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
}

TEST_F(GpuScratchTest, ServesOneLayerAfterTheOther) {
  open_all();
  ASSERT_GT(scratch_of(lane_), 0u);
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  for (const std::uint32_t index : {0u, 1u, 2u, 0u}) {
    const std::vector<std::int32_t> fetched = fetch(index, {7, 2});
    EXPECT_TRUE(slot_is(index, fetched[0], 7));
    EXPECT_TRUE(slot_is(index, fetched[1], 2));
  }
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
}

TEST_F(GpuScratchTest, CountsFromTheFirstExpertBeforeThereAreDeviceSlots) {
  FakeGpuOptions options;
  options.spoil = [](GpuSegmentView view) {
    for (std::uint32_t l = 0; l < view.model->n_layers; ++l) view.layers[l].shape = MOECACHED_SHAPE_HOST_ONLY;
  };
  open_all(options);
  ASSERT_GT(scratch_of(lane_), 0u);
  ASSERT_EQ(layer(2).by_expert, 1u);
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  const std::vector<std::int32_t> fetched = fetch(2, {0, 15});
  EXPECT_TRUE(slot_is(2, fetched[0], 0));
  EXPECT_TRUE(slot_is(2, fetched[1], 15));
  EXPECT_GE(fetched[0], 16);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
}

TEST_F(GpuScratchTest, BelongsToOneLaneAtATime) {
  open_all();
  moecached_gpu_lane* second = open_lane();
  ASSERT_EQ(scratch_of(lane_), 64u);
  EXPECT_EQ(scratch_of(lane_), 64u) << "asking again changes nothing";
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u);
  EXPECT_EQ(scratch_of(second), 0u);
  moecached_gpu_lane_close(lane_);
  lanes_.erase(lanes_.begin());
  EXPECT_EQ(scratch_of(second), 64u);
}

TEST_F(GpuScratchTest, IsNotThereBehindAMemfd) {
  FakeGpuOptions options;
  options.memfd = true;
  open_all(options);
  EXPECT_EQ(scratch_of(lane_), 0u);
}

TEST_F(GpuScratchTest, IsAskedForAgainWithoutHarmWhenThereIsNoMemory) {
  open_all();
  for (const char* function :
       {"cuModuleLoadData", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuLaunchKernel"}) {
    const unsigned long long before = cuda_.objects();
    cuda_.fail_next(function, CUDA_ERROR_OUT_OF_MEMORY);
    std::uint32_t n_slots = 99;
    EXPECT_NE(moecached_gpu_lane_scratch(lane_, &n_slots), MOECACHED_OK) << function;
    EXPECT_EQ(n_slots, 0u);
    EXPECT_EQ(cuda_.objects(), before) << function;
  }
  EXPECT_EQ(scratch_of(lane_), 64u);
}

TEST_F(GpuScratchTest, RefusesWhatDoesNotFit) {
  open_all();
  moecached_gpu_fetch request = {&event_, 64, 64, 1, 0};
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &request), MOECACHED_E_ARGUMENT) << "there are no scratch slots";
  ASSERT_GT(scratch_of(lane_), 0u);
  for (const std::uint32_t n : {0u, 65u}) {
    request.n_ids = n;
    EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &request), MOECACHED_E_ARGUMENT);
  }
  request.n_ids = 1;
  request.layer = 3;
  EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &request), MOECACHED_E_ARGUMENT);
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
  request.layer = 0;
  EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &request), MOECACHED_E_ARGUMENT) << "no epoch";
}

TEST_F(GpuScratchTest, IsAskedForAgainBehindARestartOfTheDaemon) {
  open_all();
  ASSERT_EQ(scratch_of(lane_), 64u);
  start_daemon({}, 0x5678);
  ASSERT_EQ(moecached_session_reconnect(session_), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(layer(0).n_slots_fetched, 0u);
  EXPECT_EQ(scratch_of(lane_), 64u);
  ASSERT_EQ(moecached_gpu_lane_begin(lane_), MOECACHED_OK);
  EXPECT_TRUE(slot_is(0, fetch(0, {5})[0], 5));
  ASSERT_EQ(submit(lane_, {}), MOECACHED_OK);
}

}  // namespace
}  // namespace moecached::client::test
