// plan_slots and plan_stream_half of shared_model.h: how memory is shared out.
#include <gtest/gtest.h>

#include "daemon/ipc/shared_model.h"

namespace moecached {
namespace {

ModelLayout layout(std::uint32_t n_layers, std::uint32_t n_experts, std::uint64_t expert_bytes,
                   std::uint32_t top_k) {
  ModelLayout out;
  out.n_expert_used = top_k;
  for (std::uint32_t l = 0; l < n_layers; ++l) {
    LayerLayout layer;
    layer.block = l;
    layer.n_experts = n_experts;
    layer.slot_stride = expert_bytes;
    PartLayout part;
    part.expert_bytes = expert_bytes;
    layer.parts.push_back(part);
    out.layers.push_back(layer);
  }
  return out;
}

SlotsSpec spec(SlotsSpec::Kind kind, double value = 0) { return {.kind = kind, .value = value}; }

TEST(PlanSlots, AutoTakesEverythingThatFits) {
  const auto n = plan_slots(layout(4, 32, 4096, 4), spec(SlotsSpec::Kind::kAuto), 1u << 30);
  ASSERT_TRUE(n);
  EXPECT_EQ(*n, std::vector<std::uint32_t>(4, 32));
}

TEST(PlanSlots, AutoNeverExceedsTheBudgetAndLeavesLessThanOneSlotALayer) {
  const ModelLayout model = layout(4, 32, 4096, 4);
  for (std::uint64_t budget = 4 * 4 * 4096; budget < 4 * 32 * 4096; budget += 1000) {
    const auto n = plan_slots(model, spec(SlotsSpec::Kind::kAuto), budget);
    ASSERT_TRUE(n);
    EXPECT_LE(pool_bytes_of(model, *n), budget);
    EXPECT_GT(pool_bytes_of(model, *n) + 4 * 4096, budget);
  }
}

TEST(PlanSlots, PercentIsOfEachLayersExperts) {
  const auto n = plan_slots(layout(2, 32, 4096, 4), spec(SlotsSpec::Kind::kPercent, 25), 1u << 30);
  ASSERT_TRUE(n);
  EXPECT_EQ(*n, std::vector<std::uint32_t>(2, 8));
}

TEST(PlanSlots, NeverFewerThanTopKNorMoreThanExperts) {
  EXPECT_EQ(*plan_slots(layout(1, 32, 4096, 4), spec(SlotsSpec::Kind::kCount, 1), 1u << 30),
            std::vector<std::uint32_t>{4});
  EXPECT_EQ(*plan_slots(layout(1, 32, 4096, 4), spec(SlotsSpec::Kind::kCount, 99), 1u << 30),
            std::vector<std::uint32_t>{32});
}

TEST(PlanSlots, TooSmallABudgetIsAnErrorThatNamesWhatItTakes) {
  const auto n = plan_slots(layout(8, 32, 1u << 20, 4), spec(SlotsSpec::Kind::kAuto), 1u << 20);
  ASSERT_FALSE(n);
  EXPECT_EQ(n.error().code, FaultCode::kLimit);
  EXPECT_NE(n.error().text.find("32 MiB"), std::string::npos) << n.error().text;
  EXPECT_NE(n.error().text.find("pool.bytes"), std::string::npos);
}

TEST(PlanSlots, AskedForMoreThanTheBudgetIsAnErrorNotALess) {
  EXPECT_FALSE(plan_slots(layout(8, 32, 1u << 20, 4), spec(SlotsSpec::Kind::kCount, 32), 64u << 20));
}

TEST(PlanStreamHalf, HoldsTheLargestPartWhateverTheLimit) {
  EXPECT_GE(plan_stream_half(layout(1, 8, 33u << 20, 2), 1u << 20, false), 33u << 20);
}

TEST(PlanStreamHalf, IsNotLargerThanAWholeTensorAndAPage) {
  EXPECT_EQ(plan_stream_half(layout(1, 8, 4096, 2), 32u << 20, false), 9u * 4096);
}

TEST(PlanStreamHalf, HoldsMoreExpertsWhereAGpuWaitsForThem) {
  const ModelLayout model = layout(1, 64, 1u << 20, 2);
  EXPECT_EQ(plan_stream_half(model, 256u << 20, false), (8u << 20) + 4096);
  EXPECT_EQ(plan_stream_half(model, 256u << 20, true), (32u << 20) + 4096);
  EXPECT_EQ(plan_stream_half(model, 32u << 20, true), (16u << 20) + 4096);
}

}  // namespace
}  // namespace moecached
