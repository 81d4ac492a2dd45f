#include "daemon/policy/lfu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using ::testing::HasSubstr;
using testing_policies::experts;
using testing_policies::ranked;

TEST(LfuPolicy, EvictsTheExpertWithTheFewestUses) {
  LfuPolicy policy({.n_experts = 8, .n_slots = 3}, 0);
  for (std::uint32_t value : {1, 2, 3}) policy.on_insert(ExpertIndex(value), 1);
  policy.on_access(ExpertIndex(1), 2);
  policy.on_access(ExpertIndex(1), 3);
  policy.on_access(ExpertIndex(3), 4);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({2, 3, 1}));
}

TEST(LfuPolicy, WithoutHalvingOldUsesOutweighNewOnesForEver) {
  LfuPolicy forever({.n_experts = 4, .n_slots = 2}, 0);
  LfuPolicy fading({.n_experts = 4, .n_slots = 2}, 16);
  for (LfuPolicy* policy : {&forever, &fading}) {
    for (std::uint32_t value : {0, 1}) policy->on_insert(ExpertIndex(value), 1);
    for (Step step = 2; step <= 50; ++step) policy->on_access(ExpertIndex(0), step);
    for (Step step = 10'000; step <= 10'010; ++step) policy->on_access(ExpertIndex(1), step);
  }
  EXPECT_EQ(ranked(forever, experts({0, 1}), 1), experts({1}));
  EXPECT_EQ(ranked(fading, experts({0, 1}), 1), experts({0}));
}

TEST(LfuPolicy, HalvesEveryCountEachTimeThatManyStepsHavePassed) {
  LfuPolicy policy({.n_experts = 4, .n_slots = 2}, 8);
  policy.on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 4; ++step) policy.on_access(ExpertIndex(0), step);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 4);
  policy.on_insert(ExpertIndex(1), 7);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 4);
  policy.on_access(ExpertIndex(1), 8);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 2);
  EXPECT_EQ(policy.count(ExpertIndex(1)), 1.5) << "its older use was halved, the newer one was not";
  policy.on_access(ExpertIndex(1), 24);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 0.5) << "two halvings were due";
}

TEST(LfuPolicy, CountsAnExpertOncePerStepAndAMissWithItsInsertionOnce) {
  LfuPolicy policy({.n_experts = 4, .n_slots = 2}, 0);
  policy.on_miss(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_access(ExpertIndex(0), 1);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 1);
}

TEST(LfuPolicy, RemembersTheUsesOfAbsentExperts) {
  LfuPolicy policy({.n_experts = 4, .n_slots = 2}, 0);
  for (Step step = 1; step <= 5; ++step) policy.on_miss(ExpertIndex(0), step);
  policy.on_insert(ExpertIndex(0), 5);
  policy.on_insert(ExpertIndex(1), 6);
  policy.on_remove(ExpertIndex(0));
  policy.on_insert(ExpertIndex(0), 7);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({1}));
}

TEST(LfuPolicy, TiesGoToTheOlderUseThenToTheLowerIndex) {
  LfuPolicy policy({.n_experts = 8, .n_slots = 3}, 0);
  policy.on_insert(ExpertIndex(4), 2);
  policy.on_insert(ExpertIndex(7), 1);
  policy.on_insert(ExpertIndex(2), 2);
  EXPECT_EQ(ranked(policy, experts({2, 4, 7}), 3), experts({7, 2, 4}));
}

TEST(LfuPolicy, AGainIsTheDifferenceInUsesPerStep) {
  LfuPolicy policy({.n_experts = 4, .n_slots = 1}, 0);
  policy.on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 10; ++step) policy.on_miss(ExpertIndex(1), step);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)), (9 - 1) / 10.0);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(3), ExpertIndex(0)), -0.1) << "never seen";
}

TEST(LfuPolicy, StartsFromASeedAndCountsNothingOfItTwice) {
  LfuPolicy policy({.n_experts = 3, .n_slots = 2}, 64);
  const PastUse past[] = {
      {.uses_per_step = 0.5, .last_step = 90}, {.uses_per_step = 0.25, .last_step = 99}, {}};
  policy.seed(past, 100);
  policy.on_insert(ExpertIndex(0), 80);
  policy.on_access(ExpertIndex(0), 90);
  policy.on_insert(ExpertIndex(1), 99);
  EXPECT_EQ(policy.count(ExpertIndex(0)), 32);
  EXPECT_EQ(policy.count(ExpertIndex(1)), 16);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({1}));
}

TEST(LfuPolicy, OptionsAreANumberOfSteps) {
  const PolicyShape shape{.n_experts = 4, .n_slots = 2};
  EXPECT_TRUE(LfuPolicy::make("", shape));
  EXPECT_TRUE(LfuPolicy::make("halve=64", shape));
  for (const char* bad : {"halve=0", "halve=1000001", "halve=x"}) {
    const auto made = LfuPolicy::make(bad, shape);
    ASSERT_FALSE(made) << bad;
    EXPECT_THAT(made.error().text, HasSubstr("from 1 to 1000000")) << bad;
  }
}

}  // namespace
}  // namespace moecached
