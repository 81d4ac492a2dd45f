#include "daemon/policy/static.h"

#include <gtest/gtest.h>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(StaticPolicy, FollowsTheSeedWhateverIsUsed) {
  StaticPolicy policy({.n_experts = 4, .n_slots = 3}, 256);
  const PastUse hot[] = {{.uses_per_step = 0.1}, {.uses_per_step = 0.9}, {.uses_per_step = 0.5}, {}};
  policy.seed(hot, 0);
  EXPECT_FALSE(policy.is_learning());
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1);
  for (Step step = 2; step < 2000; ++step) policy.on_access(ExpertIndex(0), step);
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), experts({0, 2, 1}));
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(2), ExpertIndex(0)), 0.4);
  EXPECT_LT(policy.gain(ExpertIndex(3), ExpertIndex(0)), 0);
}

TEST(StaticPolicy, OnceTheHotExpertsAreInOnlyTheOneOtherSlotMoves) {
  StaticPolicy policy({.n_experts = 8, .n_slots = 3}, 256);
  std::vector<PastUse> hot(8);
  hot[6].uses_per_step = hot[7].uses_per_step = 0.5;
  policy.seed(hot, 0);
  Replay replay(policy, 3);
  replay.step(experts({6, 7}));
  for (std::uint32_t i = 0; i < 60; ++i) replay.step(experts({i % 6}));
  EXPECT_TRUE(testing_policies::contains(replay.residents(), ExpertIndex(6)));
  EXPECT_TRUE(testing_policies::contains(replay.residents(), ExpertIndex(7)));
}

TEST(StaticPolicy, WithoutASeedTheFirstStepsAreTheList) {
  StaticPolicy policy({.n_experts = 4, .n_slots = 2}, 10);
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(1), 1);
  for (Step step = 2; step <= 10; ++step) policy.on_access(ExpertIndex(step < 8 ? 1 : 0), step);
  EXPECT_FALSE(policy.is_learning());
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({0}));
  for (Step step = 11; step <= 100; ++step) policy.on_access(ExpertIndex(0), step);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({0})) << "its uses come after the lesson";
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)), (7 - 4) / 10.0);
}

TEST(StaticPolicy, TheStepThatEndsTheLessonIsCountedWhole) {
  StaticPolicy policy({.n_experts = 4, .n_slots = 3}, 2);
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1);
  for (std::uint32_t value : {0, 1}) policy.on_access(ExpertIndex(value), 2);
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), experts({2, 0, 1}));
}

TEST(StaticPolicy, ASeedOfNoUsesIsNone) {
  StaticPolicy policy({.n_experts = 2, .n_slots = 1}, 10);
  policy.seed(std::vector<PastUse>(2), 50);
  EXPECT_TRUE(policy.is_learning());
  policy.on_miss(ExpertIndex(1), 51);
  EXPECT_GT(policy.gain(ExpertIndex(1), ExpertIndex(0)), 0);
}

}  // namespace
}  // namespace moecached
