#include "daemon/policy/learned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "daemon/policy/ewma.h"
#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::Experts;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(LearnedPolicy, RanksByUseBeforeItHasLearntAnything) {
  LearnedPolicy policy({.n_experts = 8, .n_slots = 3});
  for (std::uint32_t value : {0, 1, 2}) policy.on_miss(ExpertIndex(value), 1);
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1);
  policy.on_access(ExpertIndex(1), 2);
  policy.on_access(ExpertIndex(0), 2);
  policy.on_access(ExpertIndex(1), 3);
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), experts({2, 0, 1}));
}

TEST(LearnedPolicy, LikelihoodsBecomeTheSharesOfWhatHappens) {
  LearnedPolicy policy({.n_experts = 8, .n_slots = 4});
  std::mt19937 random(3);
  for (Step step = 1; step <= 20'000; ++step) {
    policy.on_miss(ExpertIndex(0), step);
    if (random() % 8 == 0) policy.on_miss(ExpertIndex(1), step);
  }
  EXPECT_GT(policy.likelihood(ExpertIndex(0)), 0.97);
  EXPECT_NEAR(policy.likelihood(ExpertIndex(1)), 0.41, 0.15) << "1 - (7/8)^4";
  EXPECT_LT(policy.likelihood(ExpertIndex(5)), 0.03) << "never used";
}

// Two experts that are used equally often; which of the two comes next is said by another one, used just
// before.
TEST(LearnedPolicy, LearnsWhoFollowsWhom) {
  LearnedPolicy policy({.n_experts = 16, .n_slots = 8});
  std::mt19937 random(5);
  Step step = 0;
  std::uint32_t right = 0, asked = 0;
  for (int round = 0; round < 6000; ++round) {
    const auto which = static_cast<std::uint32_t>(random() % 2);
    policy.on_miss(ExpertIndex(which), ++step);  // 0 announces 2, 1 announces 3
    if (round >= 5000) {
      ++asked;
      right += ranked(policy, experts({2, 3}), 1) == experts({3 - which});
    }
    policy.on_miss(ExpertIndex(2 + which), ++step);
    for (int i = 0; i < 6; ++i)
      policy.on_miss(ExpertIndex(8 + static_cast<std::uint32_t>(random() % 8)), ++step);
  }
  EXPECT_GT(right, asked * 9 / 10);
}

TEST(LearnedPolicy, HitsMoreThanEwmaWhereExpertsAnnounceEachOther) {
  constexpr PolicyShape kShape{.n_experts = 32, .n_slots = 8};
  LearnedPolicy learned(kShape);
  EwmaPolicy ewma(kShape, 0.97);
  const auto hits = [&](EvictionPolicy& policy) {
    std::mt19937 random(7);
    Replay replay(policy, kShape.n_slots);
    std::size_t n = 0;
    std::uint32_t at = 0;
    for (int i = 0; i < 20'000; ++i) {
      // A walk among eight groups of four, mostly to the next one.
      at = random() % 10 < 8 ? (at + 1) % 8 : static_cast<std::uint32_t>(random() % 8);
      n += replay.step(experts({at * 4, at * 4 + 1, at * 4 + 2 + static_cast<std::uint32_t>(random() % 2)}));
    }
    return n;
  };
  EXPECT_GT(hits(learned), hits(ewma) + 2000);
}

TEST(LearnedPolicy, AGainIsTheDifferenceInUsesPerStep) {
  LearnedPolicy policy({.n_experts = 4, .n_slots = 1});
  policy.on_miss(ExpertIndex(0), 1);
  for (Step step = 2; step <= 200; ++step) policy.on_miss(ExpertIndex(1), step);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)),
                   (policy.likelihood(ExpertIndex(1)) - policy.likelihood(ExpertIndex(0))) / 4);
  EXPECT_GT(policy.gain(ExpertIndex(1), ExpertIndex(0)), 0.2);
  EXPECT_LT(policy.gain(ExpertIndex(0), ExpertIndex(1)), -0.2);
}

TEST(LearnedPolicy, StartsFromASeed) {
  LearnedPolicy policy({.n_experts = 3, .n_slots = 2});
  const PastUse past[] = {
      {.uses_per_step = 0.5, .last_step = 90}, {.uses_per_step = 0.1, .last_step = 99}, {}};
  policy.seed(past, 100);
  policy.on_insert(ExpertIndex(0), 80);
  policy.on_insert(ExpertIndex(1), 99);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 2), experts({1, 0}));
}

TEST(LearnedPolicy, LayersWithManyExpertsAndLargeStepsWork) {
  LearnedPolicy policy({.n_experts = 512, .n_slots = 64});
  Replay replay(policy, 64);
  std::mt19937 random(9);
  for (int i = 0; i < 300; ++i) {
    Experts set;
    while (set.size() < 40) {
      const ExpertIndex expert(static_cast<std::uint32_t>(std::min(random() % 512, random() % 512)));
      if (!testing_policies::contains(set, expert)) set.push_back(expert);
    }
    replay.step(set);
    ASSERT_LE(replay.residents().size(), 64u);
  }
}

}  // namespace
}  // namespace moecached
