// Promotions: experts that nobody leases are loaded because their use says so, where misses are read in
// place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "daemon/policy/registry.h"
#include "daemon/residency/layer_table.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;
constexpr double kInfinite = std::numeric_limits<double>::infinity();
const Texts kNoRoom{"no room"};

// Half of each step's weight is that of the next: scores by hand.
constexpr const char* kHalving = "ewma:decay=500";

TEST(Promotion, IntoAFreeSlotGainsWithoutLimitAndReadsAtOnce) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, kHalving);
  EXPECT_EQ(b.gain(3), kInfinite) << "even of an expert that nobody has used yet";
  EXPECT_EQ(b.promoted(3), (Texts{"read 0/0 expert 3 slot 0"}));
  EXPECT_EQ(b.gain(5), kInfinite);
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 3 slot 0"}));
  EXPECT_EQ(b.promoted(5), (Texts{"read 0/0 expert 5 slot 1"}));
  EXPECT_LT(b.gain(6), kInfinite) << "no slot is free any more";
}

TEST(Promotion, OfWhatIsResidentOrOnItsWayGainsNothingAndIsRefused) {
  BrainHarness b({.n_experts = 8, .n_slots = 4}, 1, kHalving);
  b.make_resident(0, {1});
  EXPECT_EQ(b.gain(1), 0);
  EXPECT_EQ(b.promoted(1), kNoRoom);
  (void)b.promoted(2);
  EXPECT_EQ(b.gain(2), 0);
  EXPECT_EQ(b.promoted(2), kNoRoom) << "once is enough";
}

TEST(Promotion, TakesTheSlotOfThePolicysVictimThroughAGracePeriod) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 1, kHalving);
  b.make_resident(0, {0, 1, 2});
  (void)b.routed(0, {0, 2});
  (void)b.routed(0, {0, 5});
  EXPECT_EQ(b.promoted(5), (Texts{"unpublish 0/0 expert 1 slot 1"}));
  EXPECT_EQ(b.resident(), 2u);
  EXPECT_EQ(b.graced(1), (Texts{"read 0/0 expert 5 slot 1"}));
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 5 slot 1"}));
  EXPECT_EQ(b.resident(), 3u);
  EXPECT_EQ(b.counters().evictions, 1u);
  EXPECT_EQ(b.counters().insertions, 4u);
  EXPECT_EQ(b.counters().leases, 1u) << "a promotion is none";
}

TEST(Promotion, MissesReachThePolicyAndMakeTheGain) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, kHalving);
  b.make_resident(0, {0});  // step 1: 0 scores 0.5
  (void)b.routed(0, {0});   // step 2: 0.75
  (void)b.routed(0, {4});   // step 3: 0.375; the missed one 0.5
  EXPECT_DOUBLE_EQ(b.gain(4), 0.125);
  EXPECT_DOUBLE_EQ(b.gain(7), -0.375) << "an expert that nobody uses";
  (void)b.routed(0, {0});  // step 4
  EXPECT_DOUBLE_EQ(b.gain(4), 0.25 - 0.6875);
  EXPECT_EQ(b.counters().misses, 2u);
}

TEST(Promotion, OfAPolicyWithoutAnEstimateIsWorthIt) {
  for (const char* policy : {"lru", "slru"}) {
    BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, policy);
    b.make_resident(0, {0});
    EXPECT_EQ(b.gain(4), 1) << policy;
  }
}

TEST(Promotion, IsRefusedWhileNothingMayBeEvicted) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 2, kHalving);
  b.make_resident(0, {0, 1});
  (void)b.lease(0, {0, 1});  // granted until its epoch is completed
  (void)b.routed(1, {5});
  EXPECT_EQ(b.gain(5), 0);
  EXPECT_EQ(b.promoted(5), kNoRoom);
  (void)b.completed(0);
  EXPECT_GT(b.gain(5), -1);
  EXPECT_NE(b.gain(5), 0);
  EXPECT_THAT(b.promoted(5), ::testing::ElementsAre(::testing::StartsWith("unpublish 0/0 expert 0")));
}

TEST(Promotion, SparesLeasedExpertsWhateverThePolicyThinksOfThem) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 2, kHalving);
  b.make_resident(0, {0, 1});
  (void)b.lease(0, {0});
  for (int i = 0; i < 5; ++i) (void)b.routed(1, {1});  // by score 0 were the victim
  EXPECT_EQ(b.promoted(5), (Texts{"unpublish 0/0 expert 1 slot 1"}));
  EXPECT_EQ(b.promoted(6), kNoRoom);
}

TEST(Promotion, IsRefusedWhileEverySlotIsOnItsWay) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, kHalving);
  (void)b.promoted(0);
  (void)b.promoted(1);
  EXPECT_EQ(b.gain(2), 0);
  EXPECT_EQ(b.promoted(2), kNoRoom);
  (void)b.read(1);
  EXPECT_EQ(b.promoted(2), (Texts{"unpublish 0/0 expert 1 slot 1"}));
}

TEST(Promotion, LeavesTheExpertUnpinnedSoThatItCanBeTheNextVictim) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, kHalving);
  (void)b.promoted(3);
  (void)b.read(0);
  EXPECT_EQ(b.promoted(4), (Texts{"unpublish 0/0 expert 3 slot 0"}));
  (void)b.graced(0);
  (void)b.read(0);
  EXPECT_EQ(b.lease(0, {5}), (Texts{"unpublish 0/0 expert 4 slot 0"}));
}

TEST(Promotion, AskingForTheGainChangesNothing) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, kHalving);
  b.make_resident(0, {0, 1});
  (void)b.routed(0, {1, 4});
  const double first = b.gain(4);
  for (std::uint32_t expert = 0; expert < 8; ++expert) (void)b.gain(expert);
  EXPECT_EQ(b.checked(), Texts{});
  EXPECT_EQ(b.gain(4), first);
  EXPECT_EQ(b.brain.coming(ModelId(0)), 0u);
  EXPECT_EQ(b.counters().lookups, 4u);
}

TEST(Promotion, ComingCountsWhatWaitsForASlotOrIsBeingReadOverAllLayers) {
  Brain brain;
  ASSERT_TRUE(brain.add_model(ModelId(2), {.layers = {{8, 2}, {8, 1}}, .policy = kHalving}));
  const auto promote = [&](std::uint32_t layer, std::uint32_t expert) {
    const bool started = brain.promote(ModelId(2), LayerIndex(layer), ExpertIndex(expert));
    brain.check_invariants();
    return started;
  };
  const auto read = [&](std::uint32_t layer, std::uint32_t slot, ReadOutcome outcome) {
    brain.read_done(ModelId(2), LayerIndex(layer), SlotIndex(slot), outcome);
    brain.check_invariants();
  };
  EXPECT_EQ(brain.coming(ModelId(2)), 0u);
  EXPECT_TRUE(promote(0, 1));
  EXPECT_TRUE(promote(0, 2));
  EXPECT_TRUE(promote(1, 7));
  EXPECT_EQ(brain.coming(ModelId(2)), 3u);
  EXPECT_EQ(brain.resident(ModelId(2), LayerIndex(0)), 0u);
  read(0, 0, ReadOutcome::kOk);
  EXPECT_EQ(brain.coming(ModelId(2)), 2u);
  read(0, 1, ReadOutcome::kIoError);
  EXPECT_EQ(brain.coming(ModelId(2)), 1u);
  read(1, 0, ReadOutcome::kOk);
  EXPECT_EQ(brain.coming(ModelId(2)), 0u);
  EXPECT_TRUE(promote(1, 3));  // waits for a grace period first
  EXPECT_EQ(brain.coming(ModelId(2)), 1u);
  brain.grace_done(ModelId(2), LayerIndex(1), SlotIndex(0));
  EXPECT_EQ(brain.coming(ModelId(2)), 1u);
  read(1, 0, ReadOutcome::kOk);
  EXPECT_EQ(brain.coming(ModelId(2)), 0u);
  EXPECT_EQ(brain.resident(ModelId(2), LayerIndex(1)), 1u);
}

TEST(Promotion, WhoseReadFailedLeavesAFreeSlotAndMayBeTriedAgain) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, kHalving);
  (void)b.promoted(3);
  EXPECT_EQ(b.read(0, ReadOutcome::kIoError), Texts{});
  EXPECT_EQ(b.resident(), 0u);
  EXPECT_EQ(b.counters().read_failures, 1u);
  EXPECT_EQ(b.gain(3), kInfinite);
  EXPECT_EQ(b.promoted(3), (Texts{"read 0/0 expert 3 slot 0"}));
}

TEST(Promotion, UnderWayIsSharedByALeaseThatAsksForTheExpert) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, kHalving);
  (void)b.promoted(3);
  EXPECT_EQ(b.lease(0, {3}), Texts{}) << "it is being read already";
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 3 slot 0", "grant lane 0 seq 1 ok"}));
  (void)b.promoted(4);
  (void)b.read(1);
  EXPECT_EQ(b.promoted(5), (Texts{"unpublish 0/0 expert 4 slot 1"})) << "the leased one stays";
}

TEST(Promotion, ThatEndsServesALeaseThatQueuedForItsSlot) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, kHalving);
  (void)b.promoted(3);
  EXPECT_EQ(b.lease(0, {4}), Texts{}) << "nothing to take yet: it queues";
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 3 slot 0", "unpublish 0/0 expert 3 slot 0"}));
  EXPECT_EQ(b.promoted(5), kNoRoom);
}

TEST(Promotion, DoesNotOvertakeALeaseThatWaitsForSlots) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 2, kHalving);
  b.make_resident(0, {0, 1});
  (void)b.lease(0, {0});
  EXPECT_EQ(b.lease(1, {4, 5}), Texts{}) << "it takes both slots, one of which is leased";
  EXPECT_EQ(b.gain(6), 0);
  EXPECT_EQ(b.promoted(6), kNoRoom) << "although slot 1 could be had";
  EXPECT_EQ(b.completed(0).size(), 2u) << "both slots are being emptied for the lease";
}

TEST(Promotion, WhoseEvictionIsUndoneIsGivenUpWhenThereIsNoOtherSlot) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, kHalving);
  b.make_resident(0, {0});
  ASSERT_EQ(b.promoted(4), (Texts{"unpublish 0/0 expert 0 slot 0"}));
  EXPECT_TRUE(b.brain.cancel_eviction({ModelId(0), LayerIndex(0), SlotIndex(0), ExpertIndex(0)}));
  EXPECT_EQ(b.checked(), (Texts{"publish 0/0 expert 0 slot 0"}));
  EXPECT_EQ(b.brain.coming(ModelId(0)), 0u);
  EXPECT_EQ(b.promoted(4), (Texts{"unpublish 0/0 expert 0 slot 0"})) << "and may be tried again";
}

TEST(Promotion, OfAModelThatIsNotThereIsNothing) {
  Brain brain;
  EXPECT_EQ(brain.promotion_gain(ModelId(3), LayerIndex(0), ExpertIndex(0)), 0);
  EXPECT_FALSE(brain.promote(ModelId(3), LayerIndex(0), ExpertIndex(0)));
  EXPECT_EQ(brain.coming(ModelId(3)), 0u);
}

TEST(PromotionDeathTest, AbortsOnIndexesOutOfRange) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, kHalving);
  EXPECT_DEATH((void)b.gain(8), "CHECK failed");
  EXPECT_DEATH((void)b.promoted(8), "CHECK failed");
  EXPECT_DEATH((void)b.promoted(0, 1), "CHECK failed");
}

// A policy that writes down what it is told.
class Witness final : public EvictionPolicy {
 public:
  explicit Witness(std::vector<std::string>& told) : told_(told) {}
  [[nodiscard]] std::string_view name() const noexcept override { return "witness"; }
  void on_insert(ExpertIndex expert, Step step) noexcept override { tell("insert", expert, step); }
  void on_access(ExpertIndex expert, Step step) noexcept override { tell("access", expert, step); }
  void on_miss(ExpertIndex expert, Step step) noexcept override { tell("miss", expert, step); }
  void on_remove(ExpertIndex expert) noexcept override { tell("remove", expert, 0); }
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override {
    const std::size_t n = std::min(candidates.size(), victims_out.size());
    std::copy_n(candidates.begin(), n, victims_out.begin());
    return n;
  }
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override {
    return newcomer.value + victim.value / 100.0;
  }

 private:
  void tell(const char* what, ExpertIndex expert, Step step) {
    told_.push_back(std::string(what) + " " + std::to_string(expert.value) + " @" + std::to_string(step));
  }
  std::vector<std::string>& told_;
};

TEST(LayerTablePromotion, TellsThePolicyOfEveryMissAndOfTheInsertionAndAsksItForTheGain) {
  std::vector<std::string> told;
  LayerCounters counters;
  LayerTable table({.model = ModelId(0), .layer = LayerIndex(0)}, {.n_experts = 8, .n_slots = 1},
                   std::make_unique<Witness>(told), counters);
  std::vector<Command> commands;
  const std::vector<std::uint32_t> no_pins(8);
  (void)table.touch(BrainHarness::ids({2, 6}));
  EXPECT_TRUE(table.promote(ExpertIndex(2), commands));
  (void)table.touch(BrainHarness::ids({2}));  // still on its way
  (void)table.read_done(SlotIndex(0), ReadOutcome::kOk, commands);
  (void)table.touch(BrainHarness::ids({2, 6}));
  EXPECT_EQ(told, (std::vector<std::string>{"miss 2 @1", "miss 6 @1", "miss 2 @2", "insert 2 @1",
                                            "access 2 @3", "miss 6 @3"}));
  told.clear();
  EXPECT_EQ(table.promotion_gain(ExpertIndex(6)), 6.02);
  EXPECT_TRUE(told.empty());
  EXPECT_TRUE(table.promote(ExpertIndex(6), commands));
  table.check({no_pins, no_pins});
  EXPECT_EQ(told, (std::vector<std::string>{"remove 2 @0"}));
}

}  // namespace
}  // namespace moecached
