#include "daemon/policy/wtinylfu.h"

#include <gtest/gtest.h>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::contains;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(WTinyLfuPolicy, ANewcomerThatWasUsedLessThanTheMainVictimGoesAgain) {
  WTinyLfuPolicy policy({.n_experts = 32, .n_slots = 4}, 25);
  Replay replay(policy, 4);
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t value : {0, 1, 2}) replay.step(experts({value}));
  }
  for (std::uint32_t value = 10; value < 20; ++value) {
    replay.step(experts({value}));
    if (value > 11) {
      EXPECT_EQ(replay.victims(), experts({value - 1}));
    }
  }
  for (std::uint32_t value : {0, 1, 2}) EXPECT_TRUE(contains(replay.residents(), ExpertIndex(value)));
}

TEST(WTinyLfuPolicy, ANewcomerThatWasUsedMoreTakesTheMainVictimsPlace) {
  WTinyLfuPolicy policy({.n_experts = 32, .n_slots = 3}, 34);
  Replay replay(policy, 3);
  replay.step(experts({0}));
  replay.step(experts({1}));
  replay.step(experts({2}));
  for (int i = 0; i < 3; ++i) replay.step(experts({2}));  // in the window, with four uses
  replay.step(experts({3}));
  EXPECT_EQ(replay.victims(), experts({0}));
  EXPECT_TRUE(contains(replay.residents(), ExpertIndex(2)));
}

TEST(WTinyLfuPolicy, ATieGoesToWhoIsThere) {
  WTinyLfuPolicy policy({.n_experts = 32, .n_slots = 2}, 50);
  Replay replay(policy, 2);
  for (std::uint32_t value : {0, 1, 2}) replay.step(experts({value}));
  EXPECT_EQ(replay.victims(), experts({1}));
}

TEST(WTinyLfuPolicy, CountsAtMostFifteenAndHalvesAfterTenUsesASlot) {
  WTinyLfuPolicy policy({.n_experts = 8, .n_slots = 2}, 50);
  policy.on_miss(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 20; ++step) policy.on_access(ExpertIndex(0), step);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 15u);
  policy.on_miss(ExpertIndex(1), 21);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 7u);
  EXPECT_EQ(policy.count(ExpertIndex(1)), 1u);
}

TEST(WTinyLfuPolicy, AGainIsTheDifferenceInUsesPerStep) {
  WTinyLfuPolicy policy({.n_experts = 8, .n_slots = 4}, 25);
  policy.on_miss(ExpertIndex(0), 1);
  for (Step step = 2; step <= 9; ++step) policy.on_miss(ExpertIndex(1), step);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)), 7 / 9.0);
  EXPECT_LT(policy.gain(ExpertIndex(5), ExpertIndex(0)), 0);
}

TEST(WTinyLfuPolicy, StartsFromASeed) {
  WTinyLfuPolicy policy({.n_experts = 3, .n_slots = 2}, 50);
  const PastUse past[] = {{.uses_per_step = 0.2, .last_step = 5}, {.uses_per_step = 0.8, .last_step = 4}, {}};
  policy.seed(past, 5);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 2u);
  EXPECT_EQ(policy.count(ExpertIndex(1)), 8u);
  policy.on_insert(ExpertIndex(0), 3);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 2u) << "what is older is part of the seed";
}

}  // namespace
}  // namespace moecached
