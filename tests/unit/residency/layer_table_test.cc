#include "daemon/residency/layer_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "daemon/policy/registry.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

class LayerTableTest : public ::testing::Test {
 protected:
  explicit LayerTableTest(LayerShape shape = {.n_experts = 8, .n_slots = 3})
      : table({.model = ModelId(4), .layer = LayerIndex(2)}, shape, lru(shape), counters),
        pins_{.all = std::vector<std::uint32_t>(shape.n_experts),
              .held = std::vector<std::uint32_t>(shape.n_experts)} {}

  static std::unique_ptr<EvictionPolicy> lru(LayerShape shape) {
    return std::move(make_policy("lru", {.n_experts = shape.n_experts, .n_slots = shape.n_slots})).value();
  }
  void admit(std::initializer_list<std::uint32_t> experts) {
    const auto ids = BrainHarness::ids(experts);
    ASSERT_TRUE(table.can_admit(ids));
    table.admit(ids, table.touch(ids), commands);
    for (std::uint32_t expert : experts) ++pins_.all[expert];
    table.check(pins_);
  }
  void unpin(std::initializer_list<std::uint32_t> experts) {
    table.unpin(BrainHarness::ids(experts));
    for (std::uint32_t expert : experts) --pins_.all[expert];
    table.check(pins_);
  }
  [[nodiscard]] bool can_admit(std::initializer_list<std::uint32_t> experts) const {
    return table.can_admit(BrainHarness::ids(experts));
  }
  // What was commanded since the last call; ends every read and grace period that it asks for.
  std::vector<std::string> settle() {
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < commands.size(); ++i) {
      const Command command = commands[i];
      texts.push_back(to_text(command));
      if (command.kind == CommandKind::kUnpublish) table.grace_done(command.slot, commands);
      if (command.kind == CommandKind::kRead) (void)table.read_done(command.slot, ReadOutcome::kOk, commands);
      table.check(pins_);
    }
    commands.clear();
    return texts;
  }

  LayerCounters counters;
  LayerTable table;
  std::vector<Command> commands;
  LayerTable::Pins pins_;
};

using Texts = std::vector<std::string>;

TEST_F(LayerTableTest, FillsFreeSlotsFirstAndNamesItsPlaceInEveryCommand) {
  admit({5, 1});
  EXPECT_EQ(settle(), (Texts{"read 4/2 expert 5 slot 0", "read 4/2 expert 1 slot 1",
                             "publish 4/2 expert 5 slot 0", "publish 4/2 expert 1 slot 1"}));
  EXPECT_EQ(table.n_resident(), 2u);
}

TEST_F(LayerTableTest, TakesTheSlotOfAVictimThroughUnpublishThenReadThenPublish) {
  admit({0, 1, 2});
  settle();
  unpin({0, 1, 2});
  admit({6});
  EXPECT_EQ(settle(), (Texts{"unpublish 4/2 expert 0 slot 0", "read 4/2 expert 6 slot 0",
                             "publish 4/2 expert 6 slot 0"}));
  EXPECT_FALSE(table.is_resident(ExpertIndex(0)));
  EXPECT_TRUE(table.is_resident(ExpertIndex(6)));
}

TEST_F(LayerTableTest, NeverTakesAPinnedSlotNorOneOfTheSetItself) {
  admit({0, 1});
  admit({2});
  settle();
  unpin({2});
  EXPECT_FALSE(can_admit({3, 4}));
  EXPECT_FALSE(can_admit({2, 3}));  // 2 stays, so there is nothing to take for 3
  EXPECT_TRUE(can_admit({0, 1, 2}));
  admit({0, 3});
  EXPECT_EQ(settle().front(), "unpublish 4/2 expert 2 slot 2");
}

TEST_F(LayerTableTest, SharesAnExpertThatIsOnItsWayAndKeepsItForBoth) {
  admit({0, 1});
  commands.clear();
  admit({1, 0});
  EXPECT_TRUE(commands.empty());
  unpin({0, 1});
  EXPECT_FALSE(can_admit({3, 4}));  // pinned by the other still
}

TEST_F(LayerTableTest, ALoadingSlotIsNeitherFreeNorEvictableEvenWhenNobodyWantsItAnyMore) {
  admit({0, 1, 2});
  unpin({0, 1, 2});
  EXPECT_FALSE(can_admit({3}));
  settle();
  EXPECT_TRUE(can_admit({3}));
}

TEST_F(LayerTableTest, AFailedReadGivesTheSlotBack) {
  admit({0});
  EXPECT_EQ(table.read_done(SlotIndex(0), ReadOutcome::kIoError, commands), ExpertIndex(0));
  unpin({0});
  EXPECT_EQ(table.n_resident(), 0u);
  EXPECT_EQ(counters.read_failures, 1u);
  EXPECT_TRUE(can_admit({3, 4, 5}));
}

TEST_F(LayerTableTest, IgnoresCompletionsThatASlotDoesNotWaitFor) {
  EXPECT_EQ(table.read_done(SlotIndex(0), ReadOutcome::kOk, commands), std::nullopt);
  table.grace_done(SlotIndex(1), commands);
  EXPECT_TRUE(commands.empty());
  admit({0, 1, 2});
  settle();
  EXPECT_EQ(table.read_done(SlotIndex(0), ReadOutcome::kIoError, commands), std::nullopt);
  unpin({0, 1, 2});
  admit({3});
  EXPECT_EQ(table.read_done(SlotIndex(0), ReadOutcome::kOk, commands), std::nullopt)
      << "the slot is still evicting";
  EXPECT_EQ(counters.insertions, 3u);
}

TEST_F(LayerTableTest, CountsHitsAndMissesAtTheEvent) {
  admit({0, 1});  // 2 misses
  settle();
  EXPECT_EQ(table.touch(BrainHarness::ids({0, 1, 7})), Step{2});
  EXPECT_EQ(counters.lookups, 5u);
  EXPECT_EQ(counters.hits, 2u);
  EXPECT_EQ(counters.misses, 3u);
  EXPECT_EQ(table.count_absent(BrainHarness::ids({0, 1, 7})), 1u);
}

TEST_F(LayerTableTest, APolicyChangeKeepsResidentsAndTheirOrderOfUse) {
  admit({0});
  settle();
  admit({1});
  settle();
  admit({2});
  settle();
  unpin({0, 1, 2});
  (void)table.touch(BrainHarness::ids({0}));
  table.replace_policy(lru({.n_experts = 8, .n_slots = 3}));
  EXPECT_EQ(table.n_resident(), 3u);
  admit({7});
  EXPECT_EQ(settle().front(), "unpublish 4/2 expert 1 slot 1");
}

TEST_F(LayerTableTest, APolicyChangeTellsASegmentedPolicyWhatWasUsedSinceItsInsertion) {
  admit({0});
  settle();
  admit({1});
  settle();
  (void)table.touch(BrainHarness::ids({0}));
  admit({2});
  settle();
  unpin({0, 1, 2});
  // SLRU takes 1 (never used again) before 0, and 2 before 0 although 2 is newer.
  table.replace_policy(std::move(make_policy("slru:probation=60", {.n_experts = 8, .n_slots = 3})).value());
  admit({6, 7});
  EXPECT_EQ(settle()[0], "unpublish 4/2 expert 1 slot 1");
  EXPECT_TRUE(table.is_resident(ExpertIndex(0)));
  EXPECT_FALSE(table.is_resident(ExpertIndex(2)));
}

TEST_F(LayerTableTest, SlotsOfHeldExpertsCountAsMissing) {
  admit({0, 1});
  (void)settle();
  EXPECT_TRUE(table.fits_beside_held(BrainHarness::ids({4, 5, 6})));
  table.hold(ExpertIndex(0));
  ++pins_.all[0], ++pins_.held[0];
  table.check(pins_);
  EXPECT_FALSE(table.fits_beside_held(BrainHarness::ids({4, 5, 6})));
  EXPECT_TRUE(table.fits_beside_held(BrainHarness::ids({4, 5}))) << "expert 1 is pinned, but not held";
  EXPECT_TRUE(table.fits_beside_held(BrainHarness::ids({0, 4, 5})));
  unpin({0, 1});
  EXPECT_FALSE(can_admit({4, 5, 6}));
  EXPECT_TRUE(can_admit({4, 5}));
  table.release(ExpertIndex(0));
  --pins_.all[0], --pins_.held[0];
  table.check(pins_);
  EXPECT_TRUE(can_admit({4, 5, 6}));
}

using LayerTableDeathTest = LayerTableTest;

TEST_F(LayerTableDeathTest, AbortsOnIndexesOutOfRangeAndOnBooksThatDoNotAgree) {
  EXPECT_DEATH((void)table.touch(BrainHarness::ids({8})), "CHECK failed");
  EXPECT_DEATH(table.grace_done(SlotIndex(3), commands), "CHECK failed");
  EXPECT_DEATH(table.unpin(BrainHarness::ids({0})), "CHECK failed");
  admit({0});
  EXPECT_DEATH(table.check({std::vector<std::uint32_t>(8), std::vector<std::uint32_t>(8)}), "CHECK failed");
}

}  // namespace
}  // namespace moecached
