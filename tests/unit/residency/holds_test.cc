// Stalled lanes: what they may be using is kept, and nobody waits for them.
#include <gtest/gtest.h>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;

TEST(StalledLane, GetsItsExpertBackAndTheNewcomerAnotherSlot) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"publish 0/0 expert 1 slot 0", "unpublish 0/0 expert 2 slot 1"}));
  EXPECT_EQ(b.graced(0), Texts{}) << "the slot is not being emptied any more";
  EXPECT_EQ(b.graced(1), (Texts{"read 0/0 expert 3 slot 1"}));
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 3 slot 1", "grant lane 1 seq 2 ok"}));
}

TEST(StalledLane, LeasesThatCannotHaveAnotherSlotAreToldSo) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  b.make_resident(0, {1});
  (void)b.lease(1, {3});
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"publish 0/0 expert 1 slot 0", "grant lane 1 seq 2 no room"}));
  EXPECT_EQ(b.lease(1, {1}), (Texts{"grant lane 1 seq 3 ok"}));
}

TEST(StalledLane, KeepsWhatItUsesUntilItsEpochIsCompleted) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.held(0, {1, 5}, 50), Texts{});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 2 slot 1"}));
  (void)b.graced(1);
  (void)b.read(1);
  EXPECT_EQ(b.lease(1, {3, 4}), (Texts{"grant lane 1 seq 3 no room"})) << "there is one slot for two";
  EXPECT_EQ(b.completed(0, 50), Texts{});
  EXPECT_EQ(b.lease(1, {3, 4}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

// One after the other: what came back first must still be kept when the next one does.
TEST(StalledLane, KeepsEveryExpertOfWhichTheEvictionIsUndone) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  b.make_resident(0, {0, 1, 2, 3});
  EXPECT_EQ(b.lease(1, {4, 5}), (Texts{"unpublish 0/0 expert 0 slot 0", "unpublish 0/0 expert 1 slot 1"}));
  EXPECT_EQ(b.held(0, {0, 1}), Texts{}) << "neither is resident now";
  EXPECT_EQ(b.undone(0, 0, 0), (Texts{"publish 0/0 expert 0 slot 0", "unpublish 0/0 expert 2 slot 2"}));
  EXPECT_EQ(b.undone(1, 1, 0), (Texts{"publish 0/0 expert 1 slot 1", "unpublish 0/0 expert 3 slot 3"}));
  (void)b.graced(2);
  (void)b.graced(3);
  (void)b.read(2);
  EXPECT_EQ(b.read(3), (Texts{"publish 0/0 expert 5 slot 3", "grant lane 1 seq 2 ok"}));
  (void)b.completed(1);
  EXPECT_EQ(b.lease(1, {6, 7}), (Texts{"unpublish 0/0 expert 4 slot 2", "unpublish 0/0 expert 5 slot 3"}))
      << "neither 0 nor 1, although they were used longest ago";
}

// The daemon does not always know what a lane uses. Sending the newcomer from one slot of its to the next
// would never end.
TEST(StalledLane, ThatMayUseAnythingLeavesTheNewcomerNothing) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {0, 1, 2});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 0 slot 0"}));
  EXPECT_EQ(b.held(0, {0, 1, 2, 3, 4, 5, 6, 7}), Texts{});
  EXPECT_EQ(b.undone(0, 0, 0), (Texts{"publish 0/0 expert 0 slot 0", "grant lane 1 seq 2 no room"}));
  EXPECT_EQ(b.lease(1, {1, 2}), (Texts{"grant lane 1 seq 3 ok"})) << "what is there is there";
}

TEST(StalledLane, LeasesThatFitBesideItWaitForTheOthersOnly) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 3);
  b.make_resident(0, {0, 1, 2});
  EXPECT_EQ(b.lease(2, {1}), (Texts{"grant lane 2 seq 2 ok"}));
  EXPECT_EQ(b.held(0, {0}), Texts{});
  EXPECT_EQ(b.lease(1, {3, 4}), Texts{}) << "lane 2 will make room";
  EXPECT_EQ(b.completed(2), (Texts{"unpublish 0/0 expert 2 slot 2", "unpublish 0/0 expert 1 slot 1"}));
}

// A lease that is granted and whose lane stops pins its experts without an epoch that anybody waits for.
TEST(StalledLane, WithAGrantedLeaseKeepsNobodyWaiting) {
  BrainHarness b({.n_experts = 8, .n_slots = 4}, 3);
  b.make_resident(0, {0, 1, 2, 3});
  EXPECT_EQ(b.lease(0, {0, 1}), (Texts{"grant lane 0 seq 2 ok"}));
  EXPECT_FALSE(b.brain.blocks_others(LaneId(0))) << "nobody waits";
  EXPECT_EQ(b.lease(1, {2, 3, 4}), Texts{});
  EXPECT_EQ(b.lease(2, {3, 5}), Texts{}) << "behind lane 1, although there is room";
  EXPECT_TRUE(b.brain.blocks_others(LaneId(0)));
  EXPECT_FALSE(b.brain.blocks_others(LaneId(1)));
  b.brain.hold_lease(LaneId(0));
  EXPECT_EQ(b.checked(), (Texts{"grant lane 1 seq 3 no room", "unpublish 0/0 expert 2 slot 2"}));
  EXPECT_FALSE(b.brain.blocks_others(LaneId(0)));
  EXPECT_EQ(b.lease(1, {2, 3, 4}), (Texts{"grant lane 1 seq 5 no room"})) << "at once";
  EXPECT_EQ(b.completed(0), Texts{});
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
}

TEST(StalledLane, LeasesThatLostASlotToItWaitAtTheHeadOfTheQueue) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 4);
  b.make_resident(0, {0, 1, 2});
  EXPECT_EQ(b.lease(2, {1, 2}), (Texts{"grant lane 2 seq 2 ok"}));
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 0 slot 0"}));
  EXPECT_EQ(b.lease(3, {4}), Texts{});
  EXPECT_EQ(b.undone(0, 0, 0), (Texts{"publish 0/0 expert 0 slot 0"})) << "lane 2 goes on and makes room";
  EXPECT_EQ(b.completed(2), (Texts{"unpublish 0/0 expert 1 slot 1", "unpublish 0/0 expert 2 slot 2"}));
  (void)b.graced(1);
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 3 slot 1", "grant lane 1 seq 3 ok"}));
}

TEST(StalledLane, HoldOfAnEpochThatIsOverOrOfAClosedLaneKeepsNothing) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  (void)b.completed(0, 60);
  EXPECT_EQ(b.held(0, {1, 2}, 60), Texts{});
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  EXPECT_EQ(b.held(0, {1, 2}, 61), Texts{});
  std::uint64_t epoch = 0;
  ASSERT_TRUE(b.brain.has_lease_until(LaneId(0), &epoch));
  EXPECT_EQ(epoch, 61u);
  EXPECT_EQ(b.lease(1, {3}), (Texts{"grant lane 1 seq 2 no room"}));
  EXPECT_EQ(b.closed(0), Texts{});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(StalledLane, HoldIsIndependentOfItsLease) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {0, 1, 2});
  EXPECT_EQ(b.lease(0, {1}, 60), (Texts{"grant lane 0 seq 2 ok"}));
  EXPECT_EQ(b.held(0, {0, 1}, 50), Texts{});
  std::uint64_t epoch = 0;
  ASSERT_TRUE(b.brain.has_lease_until(LaneId(0), &epoch));
  EXPECT_EQ(epoch, 50u) << "the one that ends first";
  EXPECT_EQ(b.completed(0, 50), Texts{});
  EXPECT_EQ(b.lease(1, {3, 4}), (Texts{"unpublish 0/0 expert 0 slot 0", "unpublish 0/0 expert 2 slot 2"}))
      << "the lease still keeps 1";
}

// A client that never completes an epoch and begins the next one all the same.
TEST(StalledLane, IsHeldOncePerLayerUntilItsNewestEpochIsOver) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  for (const std::uint64_t each : {50, 52, 51}) EXPECT_EQ(b.held(0, {1, 2}, each), Texts{});
  std::uint64_t epoch = 0;
  ASSERT_TRUE(b.brain.has_lease_until(LaneId(0), &epoch));
  EXPECT_EQ(epoch, 52u);
  EXPECT_EQ(b.completed(0, 51), Texts{});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"grant lane 1 seq 2 no room"}));
  EXPECT_EQ(b.completed(0, 52), Texts{});
  EXPECT_EQ(b.lease(1, {3}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(StalledLane, UndoOfASlotThatIsNotBeingEmptiedIsIgnored) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"ignored"}));
  EXPECT_FALSE(
      b.brain.undo_eviction({ModelId(9), LayerIndex(0), SlotIndex(0), ExpertIndex(1)}, LaneId(0), 9));
  EXPECT_FALSE(b.brain.cancel_eviction({ModelId(0), LayerIndex(0), SlotIndex(0), ExpertIndex(1)}));
  EXPECT_EQ(b.checked(), Texts{});
}

}  // namespace
}  // namespace moecached
