// An expert whose bytes are found to be wrong: nobody gets them any more, and it is read again.
#include <gtest/gtest.h>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;
using Reload = Brain::Reload;

Texts corrupt(BrainHarness& b, std::uint32_t slot, std::uint32_t expert, Reload expected = Reload::kReading) {
  EXPECT_EQ(b.brain.slot_corrupt(ModelId(0), LayerIndex(0), SlotIndex(slot), ExpertIndex(expert)), expected);
  return b.checked();
}

TEST(WrongBytes, AreReadAgainIntoTheSameSlotBehindAGracePeriod) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(corrupt(b, 0, 1), (Texts{"unpublish 0/0 expert 1 slot 0"}));
  EXPECT_EQ(corrupt(b, 0, 1, Reload::kGone), Texts{}) << "it is on its way already";
  EXPECT_EQ(b.lease(1, {1}), Texts{}) << "whoever wants it waits for it";
  EXPECT_EQ(b.graced(0), (Texts{"read 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 1 slot 0", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.resident(), 2u);
}

TEST(WrongBytes, OfAnExpertThatIsNotThereAnyMoreAreNobodysConcern) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(corrupt(b, 0, 2, Reload::kGone), Texts{}) << "another slot";
  EXPECT_EQ(corrupt(b, 1, 5, Reload::kGone), Texts{}) << "not resident";
  b.brain.lane_closed(LaneId(0));
  b.brain.lane_closed(LaneId(1));
  b.brain.remove_model(ModelId(0));
  EXPECT_EQ(corrupt(b, 0, 1, Reload::kGone), Texts{});
}

// Its lane was promised that what it leased stays until its epoch is over.
TEST(WrongBytes, WaitForTheLeaseThatPinsThem) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.lease(0, {1}, 50), (Texts{"grant lane 0 seq 2 ok"}));
  EXPECT_EQ(corrupt(b, 0, 1, Reload::kPinned), Texts{});
  EXPECT_EQ(b.completed(0, 50), Texts{});
  EXPECT_EQ(corrupt(b, 0, 1), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(WrongBytes, WhoseReadFailsLeaveTheSlotFree) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  (void)corrupt(b, 0, 1);
  (void)b.graced(0);
  EXPECT_EQ(b.read(0, ReadOutcome::kIoError), Texts{});
  EXPECT_EQ(b.lease(1, {1}), (Texts{"read 0/0 expert 1 slot 0"})) << "the next who wants it tries again";
}

// It cannot have the slot back as others have: nobody else may see those bytes.
TEST(WrongBytes, UnderALaneThatHasStoppedAreLeftToItAlone) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {1, 2, 3});
  (void)corrupt(b, 0, 1);
  EXPECT_EQ(b.lease(1, {1}), Texts{});
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"unpublish 0/0 expert 2 slot 1", "ignored"}))
      << "who waited for it gets another slot";
  EXPECT_EQ(b.slots(0), 2u);
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"ignored"})) << "told again while the lane does not move";
  EXPECT_EQ(b.graced(1), (Texts{"read 0/0 expert 1 slot 1"}));
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 1 slot 1", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.graced(0), Texts{}) << "the lane went on";
  EXPECT_EQ(b.slots(0), 3u);
  EXPECT_EQ(b.lease(0, {5}), (Texts{"read 0/0 expert 5 slot 0"}));
}

TEST(WrongBytes, UnderALaneThatHasStoppedRefuseWhatDoesNotFitBesideThem) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  (void)corrupt(b, 0, 1);
  EXPECT_EQ(b.lease(1, {1, 2}), Texts{});
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"grant lane 1 seq 2 no room", "ignored"}));
}

}  // namespace
}  // namespace moecached
