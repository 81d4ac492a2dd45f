#include "daemon/residency/slot_trader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "daemon/residency/brain.h"

namespace moecached {
namespace {

ModelShape shape_of(std::uint32_t n_layers, std::uint32_t n_experts, std::uint32_t n_slots) {
  ModelShape shape;
  for (std::uint32_t i = 0; i < n_layers; ++i)
    shape.layers.push_back(
        {.n_experts = n_experts, .n_slots = n_slots, .n_slots_max = n_experts, .slot_class = 0});
  return shape;
}

// One of `n_used` experts of the layer.
void use(SlotTrader& trader, std::uint32_t layer, std::uint32_t step, std::uint32_t n_used) {
  const ExpertIndex expert((step * 2654435761u + layer * 7) % 65521u % n_used);
  trader.use(LayerIndex(layer), {&expert, 1});
}

TEST(SlotTrader, FindsNothingBeforeItHasSeenAnything) {
  SlotTrader trader(shape_of(2, 8, 4));
  const std::vector<SlotTrader::Side> sides(2, {.n_slots = 4, .can_give = true, .can_take = true});
  EXPECT_TRUE(trader.is_due());
  EXPECT_FALSE(trader.choose(sides));
  EXPECT_FALSE(trader.is_due());
  use(trader, 0, 0, 1);
  use(trader, 1, 0, 1);
  EXPECT_TRUE(trader.is_due()) << "a token later";
}

TEST(SlotTrader, MovesASlotFromWhereItServesNothing) {
  SlotTrader trader(shape_of(3, 8, 4));
  std::vector<SlotTrader::Side> sides(3, {.n_slots = 4, .can_give = true, .can_take = true});
  for (std::uint32_t step = 0; step < 200; ++step) {
    use(trader, 0, step, 4);
    use(trader, 1, step, 5);
    use(trader, 2, step, 1);
  }
  const auto trade = trader.choose(sides);
  ASSERT_TRUE(trade);
  EXPECT_EQ(trade->from, LayerIndex(2));
  EXPECT_EQ(trade->to, LayerIndex(1));
  sides[1].can_take = false;
  EXPECT_FALSE(trader.choose(sides)) << "the others have what they use";
  sides[1].can_take = true;
  sides[2].can_give = false;
  EXPECT_FALSE(trader.choose(sides)) << "what layer 0 has it needs as much";
}

TEST(SlotTrader, SharesOutWhatIsLeftToTheLayersThatWouldUseIt) {
  SlotTrader trader(shape_of(3, 8, 4));
  const std::vector<std::uint32_t> have(3, 3), even(3, 4), room(3, 8);
  EXPECT_EQ(trader.share_out(have, even, room), even) << "before it has seen anything";
  for (std::uint32_t step = 0; step < 200; ++step) {
    use(trader, 0, step, 3);
    use(trader, 1, step, 6);
    use(trader, 2, step, 1);
  }
  EXPECT_EQ(trader.share_out(have, even, room), (std::vector<std::uint32_t>{3, 6, 3}));
  EXPECT_EQ(trader.share_out(have, even, std::vector<std::uint32_t>(3, 5))[1], 5u)
      << "no more than there is room for";
  const std::vector<std::uint32_t> none{3, 0, 3};
  EXPECT_EQ(trader.share_out(none, none, room), none) << "nor any to a layer that is to have none";
}

TEST(SlotTrader, LayersOfAnotherClassAreNoPartners) {
  ModelShape shape = shape_of(2, 8, 4);
  shape.layers[1].slot_class = 7;
  SlotTrader trader(shape);
  for (std::uint32_t step = 0; step < 200; ++step) {
    use(trader, 0, step, 5);
    use(trader, 1, step, 1);
  }
  EXPECT_FALSE(
      trader.choose(std::vector<SlotTrader::Side>(2, {.n_slots = 4, .can_give = true, .can_take = true})));
}

// Forty-eight layers alike but for chance: whatever is traded is a load for nothing.
TEST(SlotTrader, HardlyTradesBetweenEqualLayers) {
  constexpr std::uint32_t kLayers = 48, kExperts = 64;
  SlotTrader trader(shape_of(kLayers, kExperts, 24));
  std::vector<SlotTrader::Side> sides(kLayers, {.n_slots = 24, .can_give = true, .can_take = true});
  std::mt19937 random(1);
  // The smaller of two: some are in demand.
  const auto below = [&](std::uint32_t n) {
    return static_cast<std::uint32_t>(std::min(random() % n, random() % n));
  };
  std::uint32_t n_trades = 0;
  for (std::uint32_t step = 0; step < 3000; ++step) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      std::array<ExpertIndex, 2> set{ExpertIndex(below(kExperts)), {}};
      do {
        set[1] = ExpertIndex(below(kExperts));
      } while (set[1] == set[0]);
      trader.use(LayerIndex(layer), set);
    }
    if (const auto trade = trader.choose(sides)) {
      --sides[trade->from.value].n_slots;
      ++sides[trade->to.value].n_slots;
      ++n_trades;
    }
  }
  EXPECT_LT(n_trades, 60u) << "of 1152 slots, in 3000 tokens";
}

// A pool that has been settled follows when other layers come to be the concentrated ones.
TEST(SlotTrader, FollowsTheRouting) {
  SlotTrader trader(shape_of(2, 16, 8));
  std::vector<SlotTrader::Side> sides(2, {.n_slots = 8, .can_give = true, .can_take = true});
  const auto run = [&](std::uint32_t n_first, std::uint32_t n_second, std::uint32_t n_steps) {
    for (std::uint32_t step = 0; step < n_steps; ++step) {
      use(trader, 0, step, n_first);
      use(trader, 1, step, n_second);
      if (const auto trade = trader.choose(sides)) {
        --sides[trade->from.value].n_slots;
        ++sides[trade->to.value].n_slots;
      }
    }
  };
  run(12, 3, 1000);
  EXPECT_EQ(sides[0].n_slots, 12u);
  run(3, 12, 12'000);
  EXPECT_EQ(sides[1].n_slots, 12u);
}

TEST(SlotTrader, GivesBackWhatTheWidestStepNeeds) {
  SlotTrader trader(shape_of(2, 8, 4));
  for (std::uint32_t step = 0; step < 200; ++step) {
    use(trader, 0, step, 3);
    use(trader, 1, step, 4);
  }
  const std::vector<ExpertIndex> wide = {ExpertIndex(0), ExpertIndex(1), ExpertIndex(2)};
  trader.use(LayerIndex(0), wide);
  const std::vector<SlotTrader::Side> sides = {{.n_slots = 2, .can_give = true, .can_take = true},
                                               {.n_slots = 6, .can_give = true, .can_take = true}};
  const auto trade = trader.choose(sides);
  ASSERT_TRUE(trade);
  EXPECT_EQ(trade->to, LayerIndex(0));
}

}  // namespace
}  // namespace moecached
