// Device slots above those in RAM: experts move up, others come down for them, and no lease notices.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;
const Texts kRefused{"refused"};
constexpr std::uint32_t kSpare = 7;

constexpr std::uint32_t device(std::uint32_t slot) { return kDeviceSlot + slot; }

// Scores by hand: half of each step's weight is that of the next.
ModelShape shape_of(LayerShape layer) {
  return {.layers = {layer}, .policy = "lru", .device_policy = "ewma:decay=500"};
}

class DeviceHarness : public BrainHarness {
 public:
  DeviceHarness(const ModelShape& shape, std::uint32_t n_device, const PolicyLibraries* libraries = nullptr)
      : BrainHarness(shape, 3, libraries) {
    open(n_device);
  }
  DeviceHarness(LayerShape layer, std::uint32_t n_device) : DeviceHarness(shape_of(layer), n_device) {}

  void open(std::uint32_t n) {
    brain.open_device_slots(ModelId(0), LayerIndex(0), n);
    EXPECT_EQ(checked(), Texts{});
  }
  // "refused" when nothing moves.
  [[nodiscard]] Texts rise(Experts used, double gain_min = 0) {
    const bool has_begun = brain.rise(ModelId(0), LayerIndex(0), ids(used), gain_min, kSpare);
    Texts texts = checked();
    if (!has_begun) texts.emplace_back("refused");
    return texts;
  }
  [[nodiscard]] Texts copied(std::uint32_t device_slot) {
    brain.moved(ModelId(0), LayerIndex(0), SlotIndex(device(device_slot)));
    return checked();
  }
  // From RAM slot `from` into device slot `slot`, which is the next free one.
  void rise_at_once(std::uint32_t expert, std::uint32_t from, std::uint32_t slot) {
    const std::string place = "0/0 expert " + std::to_string(expert) + " device " + std::to_string(slot) +
                              " from " + std::to_string(from);
    EXPECT_EQ(rise({expert}), (Texts{"copy up " + place}));
    EXPECT_EQ(copied(slot), (Texts{"move " + place}));
    EXPECT_EQ(graced(from), (Texts{"spare freed 7"}));
  }
  // To the last lease.
  [[nodiscard]] std::string answer(std::uint32_t lane, const std::string& status) const {
    return "grant lane " + std::to_string(lane) + " seq " + std::to_string(seq) + " " + status;
  }
  [[nodiscard]] bool is_rising() const { return brain.is_rising(ModelId(0), LayerIndex(0)); }
  [[nodiscard]] std::uint32_t on_device() const { return brain.device_resident(ModelId(0), LayerIndex(0)); }
  // UINT32_MAX: it is not resident.
  [[nodiscard]] std::uint32_t slot_of(std::uint32_t expert) const {
    const auto slot = brain.slot_of(ModelId(0), LayerIndex(0), ExpertIndex(expert));
    return slot ? slot->value : UINT32_MAX;
  }
};

// Expert 0 in the one device slot, 1 and 2 in RAM slots 1 and 2, slot 0 free; 1 is used the most.
// Then, step by step: 1 up and 0 down.
struct Swap : DeviceHarness {
  explicit Swap(const ModelShape& shape = shape_of({.n_experts = 8, .n_slots = 3}),
                const PolicyLibraries* libraries = nullptr)
      : DeviceHarness(shape, 1, libraries) {
    make_resident(0, {0, 1, 2});
    rise_at_once(0, 0, 0);
    (void)routed(0, {1, 2});
    (void)routed(0, {1});
  }
  static constexpr int kSteps = 6;
  Texts step(int i) {
    switch (i) {
      case 0:
        return rise({1});
      case 1:
        return graced(device(0));
      case 2:
      case 3:
        return copied(0);
      case 4:
        return graced(1);
      default:
        return read(1);
    }
  }
  // Steps first..last-1, and that they command what they should.
  void run(int first, int last) {
    const Texts commands[kSteps] = {
        {"unpublish 0/0 expert 0 device 0"},      {"copy aside 0/0 expert 0 device 0 spare 7"},
        {"copy up 0/0 expert 1 device 0 from 1"}, {"move 0/0 expert 1 device 0 from 1"},
        {"read 0/0 expert 0 slot 1 spare 7"},     {"publish 0/0 expert 0 slot 1", "spare freed 7"}};
    for (int i = first; i < last; ++i) EXPECT_EQ(step(i), commands[i]) << "step " << i;
  }
};

// The same without a free RAM slot: expert 3 is in slot 0. RAM's policy would have 2 go first, then 3.
struct FullSwap : Swap {
  FullSwap() {
    make_resident(0, {3});
    (void)routed(0, {1});
  }
};

TEST(DeviceSlots, ExpertRisesIntoAFreeOneAndLeavesItsRamSlotFree) {
  DeviceHarness b({.n_experts = 8, .n_slots = 3}, 2);
  b.make_resident(0, {0, 1, 2});
  EXPECT_EQ(b.rise({1}), (Texts{"copy up 0/0 expert 1 device 0 from 1"}));
  EXPECT_EQ(b.slot_of(1), 1u) << "resident where it was";
  EXPECT_EQ(b.copied(0), (Texts{"move 0/0 expert 1 device 0 from 1"}));
  EXPECT_EQ(b.slot_of(1), device(0));
  EXPECT_EQ(b.brain.free_slots(ModelId(0), LayerIndex(0)), 0u) << "lanes may still be reading";
  EXPECT_TRUE(b.is_rising());
  EXPECT_EQ(b.graced(1), (Texts{"spare freed 7"}));
  EXPECT_FALSE(b.is_rising());
  EXPECT_EQ(b.resident(), 2u);
  EXPECT_EQ(b.on_device(), 1u);
  EXPECT_EQ(b.counters().rises, 1u);
  EXPECT_EQ(b.counters().swaps, 0u);
  EXPECT_EQ(b.counters().evictions, 0u);
  EXPECT_EQ(b.lease(2, {1, 5}), (Texts{"read 0/0 expert 5 slot 1"}));
  EXPECT_EQ(b.counters().device_hits, 1u);
}

TEST(DeviceSlots, SlotThatARisenExpertLeavesServesWhoWaitsForOne) {
  DeviceHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {0, 1});
  (void)b.rise({0});
  (void)b.copied(0);
  (void)b.lease(1, {1});
  EXPECT_EQ(b.lease(2, {3}), Texts{});
  EXPECT_EQ(b.graced(0), (Texts{"spare freed 7", "read 0/0 expert 3 slot 0"}));
}

TEST(DeviceSlots, FreeOneIsFilledWithWhatIsUsedMostWhateverItGains) {
  DeviceHarness b({.n_experts = 8, .n_slots = 4}, 2);
  b.make_resident(0, {0, 1, 2, 3});
  (void)b.routed(0, {2});
  EXPECT_EQ(b.rise({0, 2, 3}, 1e9), (Texts{"copy up 0/0 expert 2 device 0 from 2"}));
  EXPECT_EQ(b.rise({0}), kRefused) << "one at a time";
  EXPECT_EQ(b.copied(1), Texts{}) << "no copy goes there";
}

TEST(DeviceSlots, OfALayerThatHasNoneNothingRises) {
  DeviceHarness b({.n_experts = 8, .n_slots = 3}, 0);
  b.make_resident(0, {0});
  EXPECT_EQ(b.rise({0}, -1), kRefused);
  b.open(1);
  EXPECT_EQ(b.rise({0}, -1), (Texts{"copy up 0/0 expert 0 device 0 from 0"}));
  EXPECT_EQ(b.brain.device_slots(ModelId(0), LayerIndex(0)), 1u);
}

TEST(DeviceSlots, ColdestComesDownForAWarmerOneWithoutAReadFromDisk) {
  Swap b;
  b.run(0, Swap::kSteps);
  EXPECT_EQ(b.slot_of(1), device(0));
  EXPECT_EQ(b.slot_of(0), 1u);
  EXPECT_FALSE(b.is_rising());
  EXPECT_EQ(b.counters().rises, 2u);
  EXPECT_EQ(b.counters().swaps, 1u);
  EXPECT_EQ(b.counters().insertions, 3u);
  EXPECT_EQ(b.counters().evictions, 0u);
}

TEST(DeviceSlots, LateAndDoubledEventsOfAMoveChangeNothing) {
  Swap b;
  b.run(0, 1);
  EXPECT_EQ(b.copied(0), Texts{}) << "no copy is under way";
  EXPECT_EQ(b.graced(1), Texts{});
  b.run(1, 2);
  EXPECT_EQ(b.graced(device(0)), Texts{});
  b.run(2, 4);
  EXPECT_EQ(b.copied(0), Texts{});
  b.run(4, 5);
  EXPECT_EQ(b.graced(1), Texts{});
  b.run(5, 6);
  EXPECT_EQ(b.read(1), Texts{});
}

TEST(DeviceSlots, SwapMustGainMoreThanTheLeast) {
  Swap b;
  // 1 was used in steps 1 to 3, 2 in steps 1 and 2, 0 in step 1.
  const double of_0 = 0.125, of_1 = 0.875, of_2 = 0.375;
  EXPECT_EQ(b.rise({1}, of_1 - of_0), kRefused);
  EXPECT_EQ(b.rise({2}, of_2 - of_0), kRefused);
  EXPECT_EQ(b.rise({5}, -1), kRefused) << "it is on disk";
  EXPECT_EQ(b.rise({0}, -1), kRefused) << "it is there already";
  EXPECT_EQ(b.rise({2, 1, 0, 5}, of_2 - of_0 - 0.01), (Texts{"unpublish 0/0 expert 0 device 0"}));
  (void)b.graced(device(0));
  EXPECT_EQ(b.copied(0), (Texts{"copy up 0/0 expert 1 device 0 from 1"})) << "the one that gains the most";
}

// It is coming, all the time: no lease asks the disk for it.
TEST(DeviceSlots, LeasesOfTheFallingExpertWaitForItAtEveryStep) {
  for (int at = 1; at < Swap::kSteps; ++at) {
    Swap b;
    b.run(0, at);
    EXPECT_EQ(b.lease(1, {0}), Texts{}) << "after step " << at;
    EXPECT_EQ(b.slot_of(0), UINT32_MAX);
    b.run(at, Swap::kSteps - 1);
    EXPECT_EQ(b.step(5), (Texts{"publish 0/0 expert 0 slot 1", "spare freed 7", b.answer(1, "ok")}));
    EXPECT_EQ(b.counters().insertions, 3u);
  }
}

TEST(DeviceSlots, RisingExpertIsResidentAndNobodysVictimAtEveryStep) {
  for (int at = 1; at < Swap::kSteps; ++at) {
    FullSwap b;
    (void)b.routed(0, {2, 3});  // by RAM's policy 1 is the one to go now
    b.run(0, at);
    EXPECT_EQ(b.lease(1, {1}, 50), (Texts{"grant lane 1 seq 3 ok"})) << "after step " << at;
    (void)b.completed(1, 50);
    EXPECT_EQ(b.lease(2, {4, 5}), (Texts{"unpublish 0/0 expert 2 slot 2", "unpublish 0/0 expert 3 slot 0"}));
  }
}

TEST(DeviceSlots, PinnedExpertDoesNotFall) {
  Swap b;
  EXPECT_EQ(b.lease(1, {0}, 50), (Texts{"grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.rise({1}, -1), kRefused) << "nobody else is there";
  (void)b.completed(1, 50);
  EXPECT_EQ(b.held(1, {0}, 51), Texts{});
  EXPECT_EQ(b.rise({1}, -1), kRefused) << "a stalled lane may be reading it";
  (void)b.completed(1, 51);
  EXPECT_EQ(b.rise({1}, -1), (Texts{"unpublish 0/0 expert 0 device 0"}));
}

TEST(DeviceSlots, AnotherFallsInPlaceOfAPinnedOne) {
  DeviceHarness b({.n_experts = 8, .n_slots = 4}, 2);
  b.make_resident(0, {0, 1, 2, 3});
  b.rise_at_once(0, 0, 0);
  b.rise_at_once(1, 1, 1);
  (void)b.routed(0, {1, 2});
  (void)b.routed(0, {1, 2});
  (void)b.lease(1, {0});
  EXPECT_EQ(b.rise({2}, -1), (Texts{"unpublish 0/0 expert 1 device 1"})) << "0 was colder";
}

// Its RAM slot would be lost to a lane that may never go on.
TEST(DeviceSlots, WhatAStalledLaneMayBeReadingDoesNotRise) {
  Swap b;
  EXPECT_EQ(b.held(2, {1}, 60), Texts{});
  EXPECT_EQ(b.rise({1}, -1), kRefused);
  (void)b.completed(2, 60);
  EXPECT_EQ(b.rise({1}, -1), (Texts{"unpublish 0/0 expert 0 device 0"}));
}

// ------------------------------------------------------------------------------------------------------
// leases of more experts than RAM has slots

TEST(DeviceSlots, LeaseNeedsRamSlotsForThoseAloneThatAreNotThere) {
  DeviceHarness b({.n_experts = 8, .n_slots = 2}, 2);
  b.make_resident(0, {0, 1});
  b.rise_at_once(0, 0, 0);
  b.rise_at_once(1, 1, 1);
  EXPECT_EQ(b.lease(1, {0, 1, 2, 3}), (Texts{"read 0/0 expert 2 slot 1", "read 0/0 expert 3 slot 0"}));
  (void)b.read(0);
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 2 slot 1", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.lease(2, {0, 2, 3, 4}), (Texts{"grant lane 2 seq 3 refused"})) << "three for two slots";
}

TEST(DeviceSlots, NothingThatAWaitingLeaseCountsOnComesDown) {
  DeviceHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {0, 1});
  b.rise_at_once(0, 0, 0);
  EXPECT_EQ(b.lease(1, {1, 2}), (Texts{"read 0/0 expert 2 slot 0"}));
  EXPECT_EQ(b.lease(2, {0, 3, 4}), Texts{});
  EXPECT_EQ(b.rise({1}, -1), kRefused) << "with 0 it would need three slots";
  (void)b.read(0);
  EXPECT_EQ(b.completed(1), (Texts{"unpublish 0/0 expert 1 slot 1", "unpublish 0/0 expert 2 slot 0"}));
}

TEST(DeviceSlots, HoldOfWhatIsThereTakesNoRamSlot) {
  DeviceHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {0, 1});
  b.rise_at_once(0, 0, 0);
  EXPECT_EQ(b.held(0, {0}), Texts{});
  EXPECT_EQ(b.lease(1, {2, 3}), (Texts{"read 0/0 expert 2 slot 0", "unpublish 0/0 expert 1 slot 1"}));
}

TEST(DeviceSlots, HoldOfARisingExpertLeavesItsRamSlotWithIt) {
  DeviceHarness b({.n_experts = 8, .n_slots = 2}, 1);
  b.make_resident(0, {0, 1});
  (void)b.rise({1});
  EXPECT_EQ(b.held(0, {1}), Texts{});
  EXPECT_EQ(b.lease(1, {2, 3}), (Texts{"grant lane 1 seq 2 no room"}));
  (void)b.copied(0);
  EXPECT_EQ(b.graced(1), (Texts{"spare freed 7"}));
  EXPECT_EQ(b.lease(1, {2, 3}), (Texts{"read 0/0 expert 2 slot 1", "unpublish 0/0 expert 0 slot 0"}));
}

// ------------------------------------------------------------------------------------------------------
// stalled lanes

TEST(DeviceSlots, FallingExpertGoesBackForAStalledLaneThatMayBeReadingIt) {
  Swap b;
  b.run(0, 1);
  EXPECT_EQ(b.lease(1, {0}, 50), Texts{});
  EXPECT_EQ(b.undone(device(0), 0, 2),
            (Texts{"publish 0/0 expert 0 device 0", "spare freed 7", b.answer(1, "ok")}));
  EXPECT_FALSE(b.is_rising());
  EXPECT_EQ(b.slot_of(0), device(0));
  EXPECT_EQ(b.counters().swaps, 0u);
  EXPECT_EQ(b.graced(device(0)), Texts{}) << "it is not being emptied any more";
  (void)b.completed(1, 50);
  EXPECT_EQ(b.rise({1}, -1), kRefused) << "it is held";
  EXPECT_EQ(b.lease(1, {3, 4, 5}), (Texts{"read 0/0 expert 3 slot 0", "unpublish 0/0 expert 2 slot 2",
                                          "unpublish 0/0 expert 1 slot 1"}))
      << "1 may go again";
}

TEST(DeviceSlots, FallThatHasGoneOnIsNotUndone) {
  for (int at = 2; at <= Swap::kSteps; ++at) {
    Swap b;
    b.run(0, at);
    EXPECT_EQ(b.undone(device(0), 0, 2), (Texts{"ignored"})) << "after step " << at;
  }
}

// Nothing can go back there. Until the lane has gone on nobody may use the slot, nor wait for it.
TEST(DeviceSlots, RamSlotThatAStalledLaneMayBeReadingIsOutOfServiceUntilTheLaneGoesOn) {
  DeviceHarness b({.n_experts = 8, .n_slots = 3}, 1);
  b.make_resident(0, {0, 1, 2});
  (void)b.rise({1});
  (void)b.copied(0);
  EXPECT_EQ(b.lease(1, {3, 4, 5}), Texts{}) << "waits for the slot";
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"spare freed 7", "grant lane 1 seq 2 no room", "ignored"}));
  EXPECT_FALSE(b.is_rising());
  EXPECT_EQ(b.slot_of(1), device(0));
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"ignored"})) << "for another lane, or once more";
  EXPECT_EQ(b.lease(1, {3, 4, 5}), (Texts{"grant lane 1 seq 3 no room"})) << "at once";
  EXPECT_EQ(b.lease(1, {3, 4}), (Texts{"unpublish 0/0 expert 0 slot 0", "unpublish 0/0 expert 2 slot 2"}));
  EXPECT_EQ(b.brain.coming(ModelId(0)), 2u) << "nobody comes into that slot";
  EXPECT_EQ(b.lease(0, {5}), Texts{});
  EXPECT_EQ(b.graced(1), (Texts{"read 0/0 expert 5 slot 1"})) << "in service again";
  EXPECT_EQ(b.graced(1), Texts{});
}

TEST(DeviceSlots, FallingExpertWhoseSlotAStalledLaneKeepsTakesAFreeOne) {
  Swap b;
  b.run(0, 4);
  (void)b.lease(1, {0});
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"read 0/0 expert 0 slot 0 spare 7", "ignored"}));
  EXPECT_TRUE(b.is_rising()) << "the spare slot is in use";
  EXPECT_EQ(b.graced(1), Texts{});
  EXPECT_EQ(b.read(0), (Texts{"publish 0/0 expert 0 slot 0", "spare freed 7", b.answer(1, "ok")}));
}

TEST(DeviceSlots, FallingExpertWhoseSlotAStalledLaneKeepsTakesThatOfAVictim) {
  FullSwap b;
  b.run(0, 4);
  (void)b.lease(1, {0});
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"unpublish 0/0 expert 2 slot 2", "ignored"}));
  EXPECT_EQ(b.graced(2), (Texts{"read 0/0 expert 0 slot 2 spare 7"}));
  EXPECT_EQ(b.read(2), (Texts{"publish 0/0 expert 0 slot 2", "spare freed 7", b.answer(1, "ok")}));
  EXPECT_EQ(b.counters().evictions, 1u) << "of 2";
}

// From slot to slot, as long as there is one that nobody stalled may be reading.
TEST(DeviceSlots, FallingExpertIsGivenUpWhenStalledLanesKeepEverySlot) {
  FullSwap b;
  b.run(0, 4);
  (void)b.lease(1, {0});
  EXPECT_EQ(b.held(2, {3}), Texts{});
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"unpublish 0/0 expert 2 slot 2", "ignored"}));
  EXPECT_EQ(b.undone(2, 2, 2),
            (Texts{"publish 0/0 expert 2 slot 2", "spare freed 7", b.answer(1, "no room")}));
  EXPECT_FALSE(b.is_rising());
  EXPECT_TRUE(b.brain.is_absent(ModelId(0), LayerIndex(0), ExpertIndex(0)));
  EXPECT_EQ(b.counters().evictions, 1u) << "it is on disk alone";
  EXPECT_EQ(b.graced(1), Texts{});
  EXPECT_EQ(b.lease(1, {0}), (Texts{"read 0/0 expert 0 slot 1"}));
}

TEST(DeviceSlots, LeasesOfAFallingExpertThatIsGivenUpQueueForTheDisk) {
  FullSwap b;
  b.run(0, 4);
  EXPECT_EQ(b.lease(0, {2, 3}, 50), (Texts{"grant lane 0 seq 3 ok"}));
  (void)b.lease(1, {0});
  EXPECT_EQ(b.undone(1, 1, 2), (Texts{"spare freed 7", "ignored"})) << "lane 0 will make room";
  EXPECT_EQ(b.completed(0, 50), (Texts{"unpublish 0/0 expert 2 slot 2"}));
  EXPECT_EQ(b.graced(2), (Texts{"read 0/0 expert 0 slot 2"}));
}

TEST(DeviceSlots, CancelledFallIsUndoneAndACancelledRiseKeepsItsSlotOutOfService) {
  Swap b;
  b.run(0, 1);
  EXPECT_EQ(b.cancelled(device(0), 0), (Texts{"publish 0/0 expert 0 device 0", "spare freed 7"}));
  b.run(0, 4);
  EXPECT_EQ(b.cancelled(1, 1), (Texts{"read 0/0 expert 0 slot 0 spare 7", "ignored"}));
}

// ------------------------------------------------------------------------------------------------------
// failures, and ends in the midst

TEST(DeviceSlots, FailedCopyFromTheSpareSlotFailsTheLeasesAndIsReadFromDiskByTheNext) {
  Swap b;
  b.run(0, 5);
  (void)b.lease(1, {0});
  EXPECT_EQ(b.read(1, ReadOutcome::kIoError), (Texts{"spare freed 7", b.answer(1, "io error")}));
  EXPECT_FALSE(b.is_rising());
  EXPECT_EQ(b.counters().read_failures, 1u);
  EXPECT_EQ(b.lease(1, {0}), (Texts{"read 0/0 expert 0 slot 1"}));
}

TEST(DeviceSlots, MoveGoesOnWhenTheLaneThatWaitsForItCloses) {
  for (int at = 1; at < Swap::kSteps; ++at) {
    Swap b;
    b.run(0, at);
    EXPECT_EQ(b.lease(1, {0, 1}), Texts{});
    EXPECT_EQ(b.closed(1), Texts{});
    b.run(at, Swap::kSteps);
    EXPECT_EQ(b.lease(2, {5, 6, 7}).size(), 3u) << "nobody is pinned";
  }
}

TEST(DeviceSlots, ModelIsRemovedInTheMidstOfAMoveAndLateEventsAreIgnored) {
  for (int at = 1; at < Swap::kSteps; ++at) {
    Swap b;
    b.run(0, at - 1);
    if (at == 3 || at == 4) b.brain.moved(ModelId(0), LayerIndex(0), SlotIndex(device(0)));
    for (std::uint32_t lane = 0; lane < 3; ++lane) b.brain.lane_closed(LaneId(lane));
    b.brain.remove_model(ModelId(0));
    EXPECT_EQ(b.checked(), Texts{}) << "nor the command that was not taken yet";
    for (int i = at; i < Swap::kSteps; ++i) EXPECT_EQ(b.step(i), Texts{});
    EXPECT_FALSE(b.is_rising());
    EXPECT_EQ(b.on_device(), 0u);
  }
}

// ------------------------------------------------------------------------------------------------------
// prompts

TEST(DeviceSlots, PromptsMoveNothing) {
  DeviceHarness b({.n_experts = 8, .n_slots = 3}, 1);
  b.make_resident(0, {0, 1});
  b.rise_at_once(0, 0, 0);
  EXPECT_EQ(b.prompt_lease(1, {0, 4, 5}, 50),
            (Texts{"read 0/0 expert 4 slot 0", "read 0/0 expert 5 slot 2"}));
  (void)b.read(0);
  EXPECT_EQ(b.read(2), (Texts{"publish 0/0 expert 5 slot 2", "grant lane 1 seq 2 ok"}));
  EXPECT_EQ(b.counters().device_hits, 1u);
  (void)b.completed(1, 50);
  EXPECT_EQ(b.rise({4, 5}, -1), kRefused) << "decode has not used them";
  EXPECT_EQ(b.prompt_lease(1, {2, 3, 6}), (Texts{"grant lane 1 seq 3 no room"})) << "0 and 1 stay";
  EXPECT_EQ(b.slot_of(0), device(0));
}

// ------------------------------------------------------------------------------------------------------
// policies

// A policy that writes down what it is told and holds it to what eviction_policy.h promises.
struct Witness {
  std::string name;
  std::set<std::uint32_t> resident;
};
Texts told;

void note(const Witness& witness, const char* what, std::uint32_t expert) {
  told.push_back(witness.name + " " + what + " " + std::to_string(expert));
}

const moecached_policy_api* witness_api() {
  static moecached_policy_api api{};
  api.abi = MOECACHED_POLICY_ABI;
  api.struct_bytes = sizeof api;
  api.name = "witness";
  api.create = [](const moecached_policy_shape*, const char* options, char*, std::size_t) -> void* {
    return new Witness{.name = options, .resident = {}};
  };
  api.destroy = [](void* policy) { delete static_cast<Witness*>(policy); };
  api.on_insert = [](void* policy, std::uint32_t expert, std::uint64_t) {
    Witness& witness = *static_cast<Witness*>(policy);
    EXPECT_TRUE(witness.resident.insert(expert).second) << witness.name << " has " << expert;
    note(witness, "insert", expert);
  };
  api.on_access = [](void* policy, std::uint32_t expert, std::uint64_t) {
    const Witness& witness = *static_cast<Witness*>(policy);
    EXPECT_TRUE(witness.resident.contains(expert)) << witness.name << " has no " << expert;
    note(witness, "access", expert);
  };
  api.on_miss = [](void* policy, std::uint32_t expert, std::uint64_t) {
    const Witness& witness = *static_cast<Witness*>(policy);
    EXPECT_FALSE(witness.resident.contains(expert)) << witness.name << " has " << expert;
    note(witness, "miss", expert);
  };
  api.on_remove = [](void* policy, std::uint32_t expert) {
    Witness& witness = *static_cast<Witness*>(policy);
    EXPECT_EQ(witness.resident.erase(expert), 1u) << witness.name << " has no " << expert;
    note(witness, "remove", expert);
  };
  api.rank = [](void*, const std::uint32_t* candidates, std::size_t n, std::uint32_t* victims,
                std::size_t n_victims) {
    std::copy_n(candidates, std::min(n, n_victims), victims);
    return std::min(n, n_victims);
  };
  return &api;
}

Texts told_since() { return std::exchange(told, {}); }

struct Witnesses {
  Witnesses() { EXPECT_TRUE(libraries.add("witness", witness_api())); }
  PolicyLibraries libraries;
  const ModelShape shape{.layers = {{.n_experts = 8, .n_slots = 3}},
                         .policy = "lib:witness:in=ram",
                         .device_policy = "lib:witness:in=device"};
};

TEST(DevicePolicy, HearsOfItsExpertsAndOfWhatItHadToDoWithoutAndRamsOfItsOwnAlone) {
  Witnesses witnesses;
  DeviceHarness b(witnesses.shape, 0, &witnesses.libraries);
  told.clear();
  b.make_resident(0, {0, 1});
  EXPECT_EQ(told_since(), (Texts{"in=ram miss 0", "in=ram miss 1", "in=ram insert 0", "in=ram insert 1"}));
  b.open(1);
  EXPECT_EQ(told_since(), (Texts{"in=device miss 0", "in=device miss 1"})) << "what it has missed";
  b.rise_at_once(0, 0, 0);
  EXPECT_EQ(told_since(), (Texts{"in=ram remove 0", "in=device insert 0"}));
  (void)b.routed(0, {0, 1, 5});
  EXPECT_EQ(told_since(), (Texts{"in=device access 0", "in=device miss 1", "in=ram access 1",
                                 "in=device miss 5", "in=ram miss 5"}));
  b.open(1);
  (void)b.routed(0, {1});
  EXPECT_EQ(told_since(), (Texts{"in=device miss 1", "in=ram access 1"})) << "opened once is enough";
}

TEST(DevicePolicy, AndRamsHearOfASwapWhenItsCopiesAreDone) {
  Witnesses witnesses;
  Swap b(witnesses.shape, &witnesses.libraries);
  told.clear();
  b.run(0, 1);
  EXPECT_EQ(told_since(), (Texts{"in=device remove 0"}));
  (void)b.routed(0, {0, 1});
  EXPECT_EQ(told_since(),
            (Texts{"in=device miss 0", "in=ram miss 0", "in=device miss 1", "in=ram access 1"}));
  b.run(1, 3);
  EXPECT_EQ(told_since(), Texts{});
  b.run(3, 4);
  EXPECT_EQ(told_since(), (Texts{"in=ram remove 1", "in=device insert 1"}));
  b.run(4, 6);
  EXPECT_EQ(told_since(), (Texts{"in=ram insert 0"}));
}

TEST(DevicePolicy, ThatIsNewKnowsWhatTheOldOneKnew) {
  Witnesses witnesses;
  Swap b(witnesses.shape, &witnesses.libraries);
  (void)b.routed(0, {0, 5});
  told.clear();
  const ModelId id(0);
  ASSERT_TRUE(b.brain.set_device_policy({&id, 1}, "lib:witness:in=next"));
  // By step: all were used in the first, 2 last in the second, 1 in the third, 0 and 5 in the fourth.
  EXPECT_EQ(told_since(), (Texts{"in=next insert 0", "in=next miss 2", "in=next miss 1", "in=next miss 5",
                                 "in=next access 0"}));
  ASSERT_TRUE(b.brain.set_policy(id, "lib:witness:in=next"));
  EXPECT_EQ(told_since(), (Texts{"in=next insert 1", "in=next insert 2", "in=next access 2",
                                 "in=next access 1", "in=next miss 5"}))
      << "nothing of 0, which is in a device slot";
  b.run(0, Swap::kSteps);
  EXPECT_EQ(b.brain.device_policy(id), "lib:witness:in=next");
}

TEST(DevicePolicy, LeavesItToRamsHowLateAFallenExpertWasUsed) {
  Swap b;
  b.run(0, Swap::kSteps);
  EXPECT_EQ(b.lease(1, {5, 6}), (Texts{"read 0/0 expert 5 slot 0", "unpublish 0/0 expert 0 slot 1"}))
      << "2 was used later";
  Swap used;
  used.run(0, 1);
  (void)used.routed(0, {0});
  used.run(1, Swap::kSteps);
  EXPECT_EQ(used.lease(1, {5, 6}), (Texts{"read 0/0 expert 5 slot 0", "unpublish 0/0 expert 2 slot 2"}));
}

TEST(DevicePolicy, IsReplacedAtEveryStepOfAMoveByEveryOther) {
  const ModelId id(0);
  for (const std::string_view name : policy_names()) {
    for (int at = 0; at <= Swap::kSteps; ++at) {
      Swap b;
      b.run(0, at);
      ASSERT_TRUE(b.brain.set_policy(id, std::string(name)));
      ASSERT_TRUE(b.brain.set_device_policy({&id, 1}, std::string(name)));
      EXPECT_EQ(b.checked(), Texts{}) << "a swap of policies moves nothing";
      if (at > 0) b.run(at, Swap::kSteps);
      for (std::uint32_t i = 0; i < 50; ++i) (void)b.routed(0, {i % 3, 3 + i % 4});
      (void)b.lease(1, {4, 5, 6});
    }
  }
}

TEST(DevicePolicy, WeighsCosts) {
  ModelShape shape = shape_of({.n_experts = 8, .n_slots = 3});
  shape.device_policy = "ewma:admit=value";
  Swap b(shape);
  b.brain.set_costs(ModelId(0), LayerIndex(0), {.miss_ns = 1, .upload_ns = 1e6, .link_busy = 1});
  EXPECT_EQ(b.rise({1}), kRefused) << "not worth so dear an upload";
  const ModelId id(0);
  ASSERT_TRUE(b.brain.set_device_policy({&id, 1}, "ewma:decay=960,admit=value"));
  EXPECT_EQ(b.rise({1}), kRefused) << "the next one is told as well";
  b.brain.set_costs(ModelId(0), LayerIndex(0), {.miss_ns = 1e6, .upload_ns = 1, .link_busy = 1});
  EXPECT_EQ(b.rise({1}), (Texts{"unpublish 0/0 expert 0 device 0"}));
}

TEST(DevicePolicy, StartsFromSeededUses) {
  Swap b;
  EXPECT_EQ(b.rise({2}, 0.5), kRefused);
  const std::vector<double> uses = {0, 0, 0.9};
  ASSERT_TRUE(b.brain.seed(ModelId(0), {&uses, 1}));
  EXPECT_EQ(b.rise({2}, 0.5), (Texts{"unpublish 0/0 expert 0 device 0"}));
}

TEST(DevicePolicy, ThatCannotBeMadeIsRefusedAndNothingChanges) {
  Brain brain;
  ModelShape shape = shape_of({.n_experts = 8, .n_slots = 3});
  ASSERT_TRUE(brain.add_model(ModelId(0), shape));
  shape.device_policy = "slru:probation=101";
  EXPECT_FALSE(brain.add_model(ModelId(1), shape));
  const ModelId both[] = {ModelId(0), ModelId(1)};
  EXPECT_FALSE(brain.set_device_policy(both, "lru")) << "model 1 is not there";
  EXPECT_FALSE(brain.set_device_policy({both, 1}, "slru:probation=101"));
  EXPECT_EQ(brain.device_policy(ModelId(0)), "ewma:decay=500");
}

}  // namespace
}  // namespace moecached
