#include "daemon/residency/brain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using ::testing::HasSubstr;
using Texts = BrainHarness::Texts;

TEST(Brain, RefusesBadShapesAndPoliciesAndChangesNothing) {
  Brain brain;
  const auto refused = [&](const ModelShape& shape) {
    const Status status = brain.add_model(ModelId(1), shape);
    if (status) return std::string("accepted");
    EXPECT_EQ(status.error().code, FaultCode::kInvalid);
    EXPECT_TRUE(brain.counters(ModelId(1)).empty());
    return status.error().text;
  };
  EXPECT_THAT(refused({.layers = {}, .policy = "lru"}), HasSubstr("no MoE layer"));
  EXPECT_THAT(refused({.layers = {{8, 4}, {8, 0}}, .policy = "lru"}),
              HasSubstr("MoE layer 1: 0 slots for 8 experts"));
  EXPECT_THAT(refused({.layers = {{8, 9}}, .policy = "lru"}), HasSubstr("9 slots for 8 experts"));
  EXPECT_THAT(refused({.layers = {{8, 4}}, .policy = "best"}), HasSubstr("no policy 'best'"));
  EXPECT_EQ(refused({.layers = {{8, 4}}, .policy = "slru"}), "accepted");
  const Status again = brain.add_model(ModelId(1), {.layers = {{8, 4}}, .policy = "lru"});
  ASSERT_FALSE(again);
  EXPECT_THAT(again.error().text, HasSubstr("there already"));
  EXPECT_EQ(brain.policy(ModelId(1)), "slru");
  brain.check_invariants();
}

TEST(Brain, CountsRoutedExpertsByWhatIsResidentThen) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  b.make_resident(0, {1, 2});  // a lease of two misses
  EXPECT_EQ(b.routed(1, {2, 3}), Texts{});
  EXPECT_EQ(b.counters().lookups, 4u);
  EXPECT_EQ(b.counters().hits, 1u);
  EXPECT_EQ(b.counters().misses, 3u);
  EXPECT_EQ(b.counters().insertions, 2u);
  EXPECT_EQ(b.counters().leases, 1u);
  EXPECT_EQ(b.counters().evictions, 0u);
}

TEST(Brain, RoutingKeepsExpertsFromEviction) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1});
  b.make_resident(0, {2});
  (void)b.routed(0, {1});
  EXPECT_EQ(b.lease(0, {3}), (Texts{"unpublish 0/0 expert 2 slot 1"}));
}

TEST(Brain, AChangeOfPolicyKeepsResidentsAndHistoryAndALeaseInFlight) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 2, "slru");
  b.make_resident(0, {1});
  b.make_resident(0, {2});
  (void)b.routed(0, {1});
  (void)b.lease(1, {3});
  ASSERT_TRUE(b.brain.set_policy(ModelId(0), "lru"));
  EXPECT_EQ(b.brain.policy(ModelId(0)), "lru");
  EXPECT_EQ(b.read(2), (Texts{"publish 0/0 expert 3 slot 2", "grant lane 1 seq 3 ok"}));
  EXPECT_EQ(b.resident(), 3u);
  EXPECT_EQ(b.lease(0, {4}), (Texts{"unpublish 0/0 expert 2 slot 1"}));
}

TEST(Brain, ARefusedPolicyLeavesTheOldOne) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 2, "slru:probation=50");
  const Status refused = b.brain.set_policy(ModelId(0), "slru:probation=500");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, FaultCode::kInvalid);
  EXPECT_EQ(b.brain.policy(ModelId(0)), "slru:probation=50");
  EXPECT_EQ(b.brain.set_policy(ModelId(7), "lru").error().code, FaultCode::kNotFound);
  b.brain.check_invariants();
}

TEST(Brain, IgnoresCompletionsOfAModelThatIsGone) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {0, 1});
  (void)b.lease(0, {2, 3});
  (void)b.graced(0);
  (void)b.closed(0);
  b.brain.remove_model(ModelId(0));
  EXPECT_EQ(b.read(0), Texts{});
  EXPECT_EQ(b.graced(1), Texts{});
  EXPECT_TRUE(b.brain.counters(ModelId(0)).empty());
  EXPECT_EQ(b.brain.policy(ModelId(0)), "");
  EXPECT_EQ(b.resident(), 0u);
}

TEST(Brain, RemovingAModelTakesBackItsCommandsButNoOthers) {
  Brain brain;
  for (std::uint32_t model : {0, 1}) {
    ASSERT_TRUE(brain.add_model(ModelId(model), {.layers = {{4, 2}}, .policy = "lru"}));
    brain.lane_opened(LaneId(model), ModelId(model));
    brain.lease(LaneId(model), LayerIndex(0), BrainHarness::ids({3}), 1, 5);
  }
  brain.lane_closed(LaneId(0));
  brain.remove_model(ModelId(0));
  const auto commands = brain.take_commands();
  ASSERT_EQ(commands.size(), 1u);
  EXPECT_EQ(to_text(commands[0]), "read 1/0 expert 3 slot 0");
  brain.check_invariants();
}

TEST(Brain, TheNextOwnerOfALaneIdGetsNoAnswerOfTheLastOne) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {1});
  b.brain.lease(LaneId(0), LayerIndex(0), BrainHarness::ids({1}), 77, 99);  // granted, not taken yet
  b.brain.lane_closed(LaneId(0));
  b.brain.lane_opened(LaneId(0), ModelId(0));
  EXPECT_EQ(b.checked(), Texts{});
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  (void)b.lease(0, {1}, 1);
  EXPECT_TRUE(b.brain.has_lease_until(LaneId(0), nullptr)) << "its epochs begin anew";
}

TEST(Brain, KeepsCommandsInOrderUntilTheyAreTakenOnce) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.brain.lease(LaneId(0), LayerIndex(0), BrainHarness::ids({1}), 5, 9);
  b.brain.read_done(ModelId(0), LayerIndex(0), SlotIndex(0), ReadOutcome::kOk);
  EXPECT_EQ(b.checked(),
            (Texts{"read 0/0 expert 1 slot 0", "publish 0/0 expert 1 slot 0", "grant lane 0 seq 5 ok"}));
  EXPECT_EQ(b.checked(), Texts{});
}

TEST(Brain, LanesOfAnyIdCanOpen) {
  Brain brain;
  ASSERT_TRUE(brain.add_model(ModelId(9), {.layers = {{4, 2}}, .policy = "lru"}));
  brain.lane_opened(LaneId(300), ModelId(9));
  brain.check_invariants();
  EXPECT_FALSE(brain.has_lease_until(LaneId(5), nullptr));
  EXPECT_FALSE(brain.has_lease_until(LaneId(5000), nullptr));
}

TEST(BrainDeathTest, AbortsOnWhatAShellMustNeverDo) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1);
  EXPECT_DEATH(b.brain.lane_opened(LaneId(0), ModelId(0)), "CHECK failed");
  EXPECT_DEATH(b.brain.lane_opened(LaneId(1), ModelId(3)), "CHECK failed");
  EXPECT_DEATH(b.brain.lane_opened(LaneId(1u << 16), ModelId(0)), "CHECK failed");
  EXPECT_DEATH(b.brain.lane_closed(LaneId(1)), "CHECK failed");
  EXPECT_DEATH(b.brain.remove_model(ModelId(0)), "CHECK failed");
  EXPECT_DEATH((void)b.routed(0, {8}), "CHECK failed");
  EXPECT_DEATH((void)b.routed(0, {1}, 1), "CHECK failed");
  EXPECT_DEATH((void)b.lease(0, {1, 1}), "CHECK failed");
  EXPECT_DEATH((void)b.lease(0, {8}), "CHECK failed");
}

}  // namespace
}  // namespace moecached
