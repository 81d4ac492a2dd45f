// Slots that are opened, closed and moved from layer to layer, while others lease, hold and undo.
#include <gtest/gtest.h>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;

// Of 8 experts each.
ModelShape layers(std::vector<LayerShape> slots, std::uint32_t n_expert_used = 1) {
  ModelShape shape{
      .layers = {}, .policy = "lru", .scope = SlotScope::kGlobal, .n_expert_used = n_expert_used};
  for (LayerShape layer : slots) {
    layer.n_experts = 8;
    shape.layers.push_back(layer);
  }
  return shape;
}
const LayerShape kThreeOfFive{.n_experts = 0, .n_slots = 3, .n_slots_max = 5, .slot_class = 0};

TEST(OpenSlots, AreFreeOnesUpToTheRoomThatThereIs) {
  BrainHarness b({.n_experts = 8, .n_slots = 1, .n_slots_max = 3, .slot_class = 0});
  b.make_resident(0, {1});
  EXPECT_EQ(b.lease(1, {1, 2}), (Texts{"grant lane 1 seq 2 refused"})) << "one is open";
  EXPECT_EQ(b.brain.open_slots(ModelId(0), LayerIndex(0), 9), 2u);
  EXPECT_EQ(b.slots(0), 3u);
  EXPECT_EQ(b.brain.open_slots(ModelId(0), LayerIndex(0), 1), 0u);
  EXPECT_EQ(b.lease(1, {1, 2, 3}), (Texts{"read 0/0 expert 2 slot 1", "read 0/0 expert 3 slot 2"}));
}

TEST(OpenSlots, ServeTheLeaseThatWaits) {
  BrainHarness b({.n_experts = 8, .n_slots = 2, .n_slots_max = 3, .slot_class = 0});
  (void)b.lease(0, {0, 1});
  (void)b.read(0);
  (void)b.read(1);
  EXPECT_EQ(b.lease(1, {2}), Texts{}) << "both are leased";
  EXPECT_EQ(b.brain.open_slots(ModelId(0), LayerIndex(0), 1), 1u);
  EXPECT_EQ(b.checked(), (Texts{"read 0/0 expert 2 slot 2"}));
}

TEST(MovedSlot, ThatIsFreeIsReleasedAndOpenedAtOnce) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1});
  EXPECT_EQ(b.moved(0, 1), (Texts{"release 0/0 slot 1"}));
  EXPECT_EQ(b.slots(0), 2u);
  EXPECT_EQ(b.slots(1), 4u);
  EXPECT_EQ(b.resident(0), 1u) << "nobody had to go";
}

TEST(MovedSlot, IsEmptiedThenReleasedThenOpenedElsewhere) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  EXPECT_EQ(b.moved(0, 1), (Texts{"unpublish 0/0 expert 1 slot 0"})) << "the policy's choice";
  EXPECT_EQ(b.slots(0), 2u);
  EXPECT_EQ(b.slots(1), 3u) << "its memory is not free yet";
  EXPECT_EQ(b.moved(0, 1), (Texts{"refused"})) << "one at a time";
  EXPECT_EQ(b.graced(0), (Texts{"release 0/0 slot 0"}));
  EXPECT_EQ(b.slots(1), 4u);
  EXPECT_EQ(b.graced(0), Texts{}) << "a doubled event";
  EXPECT_EQ(b.slots(1), 4u);
  EXPECT_EQ(b.counters().evictions, 1u);
}

TEST(MovedSlot, ServesTheLeaseThatWaitsInTheOtherLayer) {
  BrainHarness b(layers({kThreeOfFive, {.n_experts = 0, .n_slots = 1, .n_slots_max = 2, .slot_class = 0}}));
  b.make_resident(0, {1, 2, 3});
  (void)b.lease(0, {0}, BrainHarness::kFar, 1);
  (void)b.read(0, ReadOutcome::kOk, 1);
  EXPECT_EQ(b.lease(1, {5}, BrainHarness::kFar, 1), Texts{});
  (void)b.moved(0, 1);
  EXPECT_EQ(b.graced(0), (Texts{"release 0/0 slot 0", "read 0/1 expert 5 slot 1"}))
      << "the memory is given back first";
}

TEST(MovedSlot, IsRefusedWhereItCannotBeSpared) {
  const LayerShape other_class{.n_experts = 0, .n_slots = 3, .n_slots_max = 5, .slot_class = 1};
  const LayerShape full{.n_experts = 0, .n_slots = 3, .n_slots_max = 3, .slot_class = 0};
  BrainHarness b(layers({kThreeOfFive, other_class, full, kThreeOfFive}));
  EXPECT_EQ(b.moved(0, 0), (Texts{"refused"})) << "to itself";
  EXPECT_EQ(b.moved(0, 1), (Texts{"refused"})) << "slots of another size";
  EXPECT_EQ(b.moved(0, 2), (Texts{"refused"})) << "no room";
  EXPECT_EQ(b.moved(0, 3), (Texts{"release 0/0 slot 0"}));
  EXPECT_EQ(b.moved(0, 3), (Texts{"refused"})) << "two tokens need two";
  (void)b.lease(0, {0, 1, 2}, BrainHarness::kFar, 2);
  for (std::uint32_t slot : {0u, 1u, 2u}) (void)b.read(slot, ReadOutcome::kOk, 2);
  EXPECT_EQ(b.moved(2, 0), (Texts{"refused"})) << "all of it is leased";
  EXPECT_EQ(b.lease(1, {5}, BrainHarness::kFar, 2), Texts{});
  (void)b.completed(0);
  (void)b.graced(0, 2);
  (void)b.read(0, ReadOutcome::kOk, 2);
  EXPECT_EQ(b.moved(2, 0), (Texts{"unpublish 0/2 expert 1 slot 1"})) << "not the leased one";
}

TEST(MovedSlot, IsRefusedWhereALeaseWaitsOrWouldNotFitAnyMore) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  (void)b.lease(0, {0, 1});
  EXPECT_EQ(b.moved(0, 1), (Texts{"release 0/0 slot 2"})) << "two are enough for it";
  BrainHarness c(layers({kThreeOfFive, kThreeOfFive}));
  (void)c.lease(0, {0, 1, 2});
  EXPECT_EQ(c.moved(0, 1), (Texts{"refused"})) << "were it sent back to the queue it would wait for ever";
  for (std::uint32_t slot : {0u, 1u, 2u}) (void)c.read(slot);
  EXPECT_EQ(c.lease(1, {5}), Texts{});
  EXPECT_EQ(c.moved(0, 1), (Texts{"refused"})) << "a lease waits";
}

TEST(MovedSlot, LeavesTheSlotsOfAStalledLaneAlone) {
  BrainHarness b(layers({{.n_experts = 0, .n_slots = 4, .n_slots_max = 5, .slot_class = 0}, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3, 4});
  (void)b.held(0, {1, 2}, 50);
  EXPECT_EQ(b.moved(0, 1), (Texts{"refused"})) << "what is not held is what two tokens need";
  (void)b.completed(0, 50);
  EXPECT_EQ(b.moved(0, 1), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(MovedSlot, ThatAStalledLaneUsesStaysWhereItIs) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  (void)b.moved(0, 1);
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"publish 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.slots(0), 3u);
  EXPECT_EQ(b.graced(0), Texts{}) << "it is not being emptied any more";
  EXPECT_EQ(b.slots(1), 3u);
  EXPECT_EQ(b.moved(0, 1), (Texts{"refused"})) << "two that are not held are what two tokens need";
  (void)b.completed(0);
  EXPECT_EQ(b.moved(0, 1), (Texts{"unpublish 0/0 expert 1 slot 0"})) << "and may be tried again";
}

TEST(MovedSlot, StaysWhenItsEvictionIsCancelled) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  (void)b.moved(0, 1);
  EXPECT_EQ(b.cancelled(0, 1), (Texts{"publish 0/0 expert 1 slot 0"}));
  EXPECT_EQ(b.slots(0), 3u);
  EXPECT_EQ(b.slots(1), 3u);
}

// The expert that had to go is wanted again at once: it comes back in another slot, and the closing one is
// still in its grace period.
TEST(MovedSlot, MayLoseAnExpertThatIsLeasedBeforeTheGracePeriodEnds) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  (void)b.moved(0, 1);
  EXPECT_EQ(b.lease(1, {1}), (Texts{"unpublish 0/0 expert 2 slot 1"}));
  EXPECT_EQ(b.undone(0, 1, 0), (Texts{"ignored"})) << "it is on its way elsewhere";
  EXPECT_EQ(b.graced(0), (Texts{"release 0/0 slot 0"}));
  EXPECT_EQ(b.slots(1), 4u);
}

TEST(MovedSlot, OutlivesAChangeOfPolicy) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  (void)b.moved(0, 1);
  for (const char* policy : {"slru", "arc", "wtinylfu", "s3fifo:admit=second-miss", "lfu"}) {
    EXPECT_TRUE(b.brain.set_policy(ModelId(0), policy));
    EXPECT_EQ(b.slots(0), 2u);
  }
  EXPECT_EQ(b.graced(0), (Texts{"release 0/0 slot 0"}));
  EXPECT_EQ(b.slots(1), 4u);
}

TEST(MovedSlot, OfARemovedModelIsForgotten) {
  BrainHarness b(layers({kThreeOfFive, kThreeOfFive}));
  b.make_resident(0, {1, 2, 3});
  (void)b.moved(0, 1);
  (void)b.closed(0);
  (void)b.closed(1);
  b.brain.remove_model(ModelId(0));
  EXPECT_EQ(b.graced(0), Texts{});
  EXPECT_EQ(b.slots(1), 0u);
}

TEST(ModelShapes, HaveRoomForWhatIsOpenAndNoMoreThanExperts) {
  Brain brain;
  for (const LayerShape bad : {LayerShape{.n_experts = 8, .n_slots = 4, .n_slots_max = 3, .slot_class = 0},
                               LayerShape{.n_experts = 8, .n_slots = 4, .n_slots_max = 9, .slot_class = 0}})
    EXPECT_FALSE(brain.add_model(ModelId(0), {.layers = {bad}}));
}

// ----------------------------------------------------------------------------------------------- by routing

// Some number that goes with the step.
std::uint32_t drawn(std::uint32_t step, std::uint32_t n) { return step * 2654435761u % 65521u % n; }

// Layer 0 uses more experts than it has slots, layer 1 fewer, layer 2 as many.
TEST(TradedSlots, GoToTheLayerThatMisses) {
  const LayerShape shape{.n_experts = 0, .n_slots = 4, .n_slots_max = 8, .slot_class = 0};
  BrainHarness b(layers({shape, shape, shape}));
  std::uint32_t n_trades = 0;
  for (std::uint32_t step = 0; step < 400; ++step) {
    (void)b.routed(0, {drawn(step, 6)}, 0);
    (void)b.routed(0, {drawn(step, 2)}, 1);
    (void)b.routed(0, {drawn(step, 4)}, 2);
    n_trades += b.brain.trade_slots(ModelId(0), LayerIndex(0)) ? 1 : 0;
    b.checked();
  }
  EXPECT_EQ(n_trades, 2u) << "then both layers have what they use";
  EXPECT_EQ(b.slots(0), 6u);
  EXPECT_EQ(b.slots(1), 2u);
  EXPECT_EQ(b.slots(2), 4u);
}

TEST(TradedSlots, StayWhereTheScopeIsTheLayer) {
  const LayerShape shape{.n_experts = 0, .n_slots = 4, .n_slots_max = 8, .slot_class = 0};
  ModelShape model = layers({shape, shape});
  model.scope = SlotScope::kLayer;
  BrainHarness b(model);
  for (std::uint32_t step = 0; step < 400; ++step) {
    (void)b.routed(0, {drawn(step, 6)}, 0);
    (void)b.routed(0, {drawn(step, 2)}, 1);
    EXPECT_FALSE(b.brain.trade_slots(ModelId(0), LayerIndex(0)));
  }
}

TEST(TradedSlots, AreNotTakenFromTheBusyLayer) {
  const LayerShape shape{.n_experts = 0, .n_slots = 4, .n_slots_max = 8, .slot_class = 0};
  BrainHarness b(layers({shape, shape}));
  for (std::uint32_t step = 0; step < 400; ++step) {
    (void)b.routed(0, {drawn(step, 6)}, 0);
    (void)b.routed(0, {drawn(step, 2)}, 1);
    EXPECT_FALSE(b.brain.trade_slots(ModelId(0), LayerIndex(1)));
  }
}

TEST(TradedSlots, LeaveALayerWhatItsWidestStepNeeds) {
  const LayerShape shape{.n_experts = 0, .n_slots = 4, .n_slots_max = 8, .slot_class = 0};
  BrainHarness b(layers({shape, shape}));
  for (std::uint32_t step = 0; step < 400; ++step) {
    (void)b.routed(0, {drawn(step, 6)}, 0);
    (void)b.routed(0, {drawn(step, 2)}, 1);
    if (step == 5) (void)b.routed(0, {0, 1, 2, 3}, 1);
    (void)b.brain.trade_slots(ModelId(0), LayerIndex(0));
    b.checked();
  }
  EXPECT_EQ(b.slots(1), 4u);
}

TEST(TradedSlots, PromptsSayNothing) {
  const LayerShape shape{.n_experts = 0, .n_slots = 4, .n_slots_max = 8, .slot_class = 0};
  BrainHarness b(layers({shape, shape}));
  for (std::uint32_t step = 0; step < 400; ++step) {
    (void)b.prompt_routed(0, {drawn(step, 6)});
    (void)b.routed(0, {drawn(step, 2)}, 1);
    EXPECT_FALSE(b.brain.trade_slots(ModelId(0), LayerIndex(0)));
  }
}

}  // namespace
}  // namespace moecached
