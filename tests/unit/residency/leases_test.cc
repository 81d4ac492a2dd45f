// Who waits for what: the lease part of the brain, through its public events.
#include <gtest/gtest.h>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;

TEST(Lease, OfResidentExpertsIsGrantedAtOnce) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.lease(1, {2, 1}), (Texts{"grant lane 1 seq 2 ok"}));
}

TEST(Lease, OfNothingIsGrantedAtOnce) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  EXPECT_EQ(b.lease(0, {}), (Texts{"grant lane 0 seq 1 ok"}));
}

TEST(Lease, IsGrantedBehindTheLastPublishOfItsExperts) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  EXPECT_EQ(b.lease(0, {3, 5}), (Texts{"read 0/0 expert 3 slot 0", "read 0/0 expert 5 slot 1"}));
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 5 slot 1"}));
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 3 slot 0", "grant lane 0 seq 1 ok"}));
  std::uint64_t epoch = 0;
  ASSERT_TRUE(b.brain.has_lease_until(LaneId(0), &epoch));
  EXPECT_EQ(epoch, BrainHarness::kFar);
}

TEST(Lease, OfMoreExpertsThanSlotsIsRefusedAtOnce) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  EXPECT_EQ(b.lease(0, {1, 2, 3}), (Texts{"grant lane 0 seq 1 refused"}));
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  EXPECT_EQ(b.lease(0, {1, 2}).size(), 2u);
}

TEST(Lease, PinsItsExpertsUntilItsEpochIsCompleted) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  EXPECT_EQ(b.lease(0, {1, 2}, 7).size(), 2u);
  (void)b.read(0);
  (void)b.read(1);
  EXPECT_EQ(b.lease(1, {3}), Texts{});
  EXPECT_EQ(b.completed(0, 6), Texts{});
  EXPECT_EQ(b.completed(0, 7), (Texts{"unpublish 0/0 expert 1 slot 0"}));
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  EXPECT_EQ(b.graced(0), (Texts{"read 0/0 expert 3 slot 0"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 3 slot 0", "grant lane 1 seq 2 ok"}));
}

TEST(Lease, OfAnEpochThatIsOverIsAnsweredButPinsNothing) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.completed(0, 9);
  (void)b.lease(0, {1}, 9);
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 1 slot 0", "grant lane 0 seq 1 ok"}));
  EXPECT_FALSE(b.brain.has_lease_until(LaneId(0), nullptr));
  EXPECT_EQ(b.lease(1, {2}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(Lease, ThatWaitsIsNotEndedByItsEpochAndIsAnswered) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.lease(0, {1}, 9);
  EXPECT_EQ(b.completed(0, 20), Texts{});
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 1 slot 0", "grant lane 0 seq 1 ok"}));
}

TEST(Lease, SharesAReadThatAnotherStarted) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  EXPECT_EQ(b.lease(0, {1, 2}).size(), 2u);
  EXPECT_EQ(b.lease(1, {2, 3}), (Texts{"read 0/0 expert 3 slot 2"}));
  (void)b.read(2);
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 2 slot 1", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 1 slot 0", "grant lane 0 seq 1 ok"}));
}

TEST(Lease, ThatCannotHaveAllItsSlotsHoldsNone) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 3);
  (void)b.lease(0, {0, 1});
  EXPECT_EQ(b.lease(1, {2, 3}), Texts{}) << "one slot is free, but half a lease is none";
  EXPECT_EQ(b.counters().leases_queued, 1u);
  (void)b.closed(1);
  EXPECT_EQ(b.lease(2, {4}), (Texts{"read 0/0 expert 4 slot 2"}));
}

TEST(Lease, WaitsItsTurnEvenWhenAllItNeedsIsThere) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 3);
  b.make_resident(0, {1, 2});
  (void)b.lease(0, {1, 2}, 500);
  EXPECT_EQ(b.lease(1, {3}), Texts{});
  EXPECT_EQ(b.lease(2, {1}), Texts{}) << "it would overtake";
  EXPECT_EQ(b.counters().leases_queued, 2u);
  EXPECT_EQ(b.completed(0, 500), (Texts{"unpublish 0/0 expert 2 slot 1", "grant lane 2 seq 4 ok"}));
}

TEST(Lease, ALargeOneIsNotStarvedByASuccessionOfSmallOnes) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 3);
  b.make_resident(0, {0, 1});
  std::uint64_t epoch[2] = {100, 100};
  (void)b.lease(0, {0}, epoch[0]);
  (void)b.lease(1, {1}, epoch[1]);
  EXPECT_EQ(b.lease(2, {2, 3}), Texts{});
  // The two never let go at the same time, and each asks again for what is there as soon as it is done.
  for (std::uint32_t round = 0; round < 20 && b.counters().evictions == 0; ++round) {
    const std::uint32_t lane = round % 2;
    (void)b.completed(lane, epoch[lane]);
    (void)b.lease(lane, {lane}, ++epoch[lane]);
  }
  EXPECT_EQ(b.counters().evictions, 2u);
}

TEST(Lease, QueuesOfTwoLayersDoNotBlockEachOther) {
  Brain brain;
  ASSERT_TRUE(brain.add_model(ModelId(0), {.layers = {{4, 1}, {4, 1}}, .policy = "lru"}));
  for (std::uint32_t lane = 0; lane < 3; ++lane) brain.lane_opened(LaneId(lane), ModelId(0));
  brain.lease(LaneId(0), LayerIndex(0), BrainHarness::ids({0}), 1, 5);
  brain.lease(LaneId(1), LayerIndex(0), BrainHarness::ids({1}), 1, 5);
  (void)brain.take_commands();
  brain.lease(LaneId(2), LayerIndex(1), BrainHarness::ids({1}), 1, 5);
  ASSERT_EQ(brain.take_commands().size(), 1u);
  brain.check_invariants();
  EXPECT_EQ(brain.counters(ModelId(0))[1].leases_queued, 0u);
}

TEST(Lease, TwoLanesThatEachHoldWhatTheOtherNeedsDoNotDeadlock) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  (void)b.lease(0, {0, 1}, 1);
  (void)b.read(0);
  (void)b.read(1);
  EXPECT_EQ(b.lease(1, {2, 3}, 1), Texts{});
  // Lane 0 asks for the other half too before it lets go of its own: the newer lease replaces the older one.
  EXPECT_EQ(b.lease(0, {4, 5}, 3), (Texts{"unpublish 0/0 expert 0 slot 0", "unpublish 0/0 expert 1 slot 1"}));
  (void)b.graced(0);
  (void)b.graced(1);
  (void)b.read(0);
  EXPECT_EQ(b.read(1).back(), "grant lane 1 seq 2 ok");
  EXPECT_EQ(b.completed(1, 1).size(), 2u);
  (void)b.graced(0);
  (void)b.graced(1);
  (void)b.read(0);
  EXPECT_EQ(b.read(1).back(), "grant lane 0 seq 3 ok");
}

TEST(Lease, ThatReplacesAQueuedOneGoesToTheEndOfTheQueue) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 3);
  (void)b.lease(0, {0}, 5);
  (void)b.read(0);
  (void)b.lease(1, {1});
  (void)b.lease(2, {2});
  (void)b.lease(1, {3});
  EXPECT_EQ(b.completed(0, 5), (Texts{"unpublish 0/0 expert 0 slot 0"}));
  EXPECT_EQ(b.graced(0), (Texts{"read 0/0 expert 2 slot 0"}));
}

TEST(Lease, OfAClosedLaneLeavesTheQueueAndLetsTheNextOneStart) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 3);
  (void)b.lease(0, {0});
  (void)b.lease(1, {1, 2});
  EXPECT_EQ(b.lease(2, {3}), Texts{});
  EXPECT_EQ(b.closed(1), (Texts{"read 0/0 expert 3 slot 1"}));
}

TEST(Lease, OfAClosedLaneUnpinsButItsReadsGoOn) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  (void)b.lease(0, {0, 1});
  EXPECT_EQ(b.closed(0), Texts{});
  EXPECT_EQ(b.lease(1, {0}), Texts{}) << "the read on its way serves it";
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 1 slot 1"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 0 slot 0", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.resident(), 2u);
}

TEST(Lease, OfAClosedLaneLetsItsEvictionsGoOn) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  b.make_resident(0, {0});
  EXPECT_EQ(b.lease(0, {1}), (Texts{"unpublish 0/0 expert 0 slot 0"}));
  (void)b.closed(0);
  EXPECT_EQ(b.graced(0), (Texts{"read 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.lease(1, {1}), (Texts{"grant lane 1 seq 3 ok"}));
}

TEST(Lease, QueuedStartsWhenAnAbandonedReadEnds) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.lease(0, {0});
  (void)b.closed(0);
  EXPECT_EQ(b.lease(1, {1}), Texts{}) << "the slot is being written";
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 0 slot 0", "unpublish 0/0 expert 0 slot 0"}));
}

TEST(FailedRead, FailsEveryLeaseThatWaitsForTheExpertAndNoOther) {
  BrainHarness b({.n_experts = 8, .n_slots = 4}, 3);
  (void)b.lease(0, {0, 1});
  (void)b.lease(1, {1, 2});
  (void)b.lease(2, {2, 3});
  EXPECT_EQ(b.read(1, ReadOutcome::kIoError),
            (Texts{"grant lane 0 seq 1 io error", "grant lane 1 seq 2 io error"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 0 slot 0"})) << "what else it loaded becomes resident";
  EXPECT_EQ(b.read(3), (Texts{"publish 0/0 expert 3 slot 3"}));
  EXPECT_EQ(b.read(2), (Texts{"publish 0/0 expert 2 slot 2", "grant lane 2 seq 3 ok"}));
  EXPECT_EQ(b.counters().read_failures, 1u);
  EXPECT_EQ(b.counters().insertions, 3u);
}

TEST(FailedRead, OfAChangedModelSaysSo) {
  BrainHarness b({.n_experts = 8, .n_slots = 4});
  (void)b.lease(0, {0});
  EXPECT_EQ(b.read(0, ReadOutcome::kModelChanged), (Texts{"grant lane 0 seq 1 model changed"}));
  EXPECT_EQ(b.counters().read_failures, 1u);
}

TEST(FailedRead, GivesItsSlotToTheQueue) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.lease(0, {0});
  EXPECT_EQ(b.lease(1, {0}), Texts{});
  EXPECT_EQ(b.counters().leases_queued, 0u) << "it shares the read";
  (void)b.lease(1, {1});
  EXPECT_EQ(b.read(0, ReadOutcome::kIoError),
            (Texts{"grant lane 0 seq 1 io error", "read 0/0 expert 1 slot 0"}));
}

TEST(FailedRead, IsTriedAgainByTheNextLease) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.lease(0, {0});
  (void)b.read(0, ReadOutcome::kIoError);
  EXPECT_EQ(b.lease(0, {0}), (Texts{"read 0/0 expert 0 slot 0"}));
  EXPECT_EQ(b.read(0).back(), "grant lane 0 seq 2 ok");
}

TEST(Lease, HitsKeepExpertsFromEvictionAsRoutingDoes) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {0});
  b.make_resident(0, {1});
  b.make_resident(0, {2});
  (void)b.lease(0, {0}, BrainHarness::kFar);
  (void)b.completed(0);
  EXPECT_EQ(b.routed(1, {1}), Texts{});
  EXPECT_EQ(b.lease(1, {5}), (Texts{"unpublish 0/0 expert 2 slot 2"}));
}

TEST(Lease, ReadsCountAsUsedWhenTheyWereAskedFor) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 2, "lru");
  (void)b.lease(0, {0}, 1);  // step 1
  (void)b.lease(1, {1}, 1);  // step 2
  (void)b.read(1);           // arrives first
  (void)b.read(0);
  (void)b.completed(0, 1);
  (void)b.completed(1, 1);
  EXPECT_EQ(b.lease(0, {2}), (Texts{"unpublish 0/0 expert 0 slot 0"}));
}

}  // namespace
}  // namespace moecached
