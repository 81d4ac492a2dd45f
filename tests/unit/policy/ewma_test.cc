#include "daemon/policy/ewma.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

namespace moecached {
namespace {

using ::testing::HasSubstr;

std::vector<ExpertIndex> experts(std::initializer_list<std::uint32_t> values) {
  std::vector<ExpertIndex> out;
  for (std::uint32_t value : values) out.emplace_back(value);
  return out;
}

std::vector<ExpertIndex> ranked(EvictionPolicy& policy, const std::vector<ExpertIndex>& candidates,
                                std::size_t n) {
  std::vector<ExpertIndex> out(n);
  out.resize(policy.rank(candidates, out));
  return out;
}

EwmaPolicy halving() { return {{.n_experts = 8, .n_slots = 4}, 0.5}; }

TEST(EwmaPolicy, ScoresAsComputedByHand) {
  EwmaPolicy policy = halving();
  EXPECT_EQ(policy.score(ExpertIndex(1)), 0);
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(1)), 0.5);
  policy.on_access(ExpertIndex(1), 2);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(1)), 0.75);
  policy.on_insert(ExpertIndex(2), 4);  // two steps later
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(1)), 0.1875);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(2)), 0.5);
  policy.on_access(ExpertIndex(1), 5);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(1)), 0.59375);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(2)), 0.25);
}

TEST(EwmaPolicy, AnExpertOfEveryStepApproachesOneAndOneOfEveryFourthAQuarter) {
  EwmaPolicy policy({.n_experts = 2, .n_slots = 2}, 0.98);
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(1), 1);
  for (Step step = 2; step <= 4000; ++step) {
    policy.on_access(ExpertIndex(0), step);
    if (step % 4 == 0) policy.on_access(ExpertIndex(1), step);
  }
  EXPECT_NEAR(policy.score(ExpertIndex(0)), 1, 1e-9);
  EXPECT_NEAR(policy.score(ExpertIndex(1)), 0.25, 0.01);
}

TEST(EwmaPolicy, AMissAndTheInsertionOfItsStepAreOneUse) {
  EwmaPolicy policy = halving();
  policy.on_miss(ExpertIndex(3), 1);
  policy.on_insert(ExpertIndex(3), 1);
  policy.on_access(ExpertIndex(3), 1);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(3)), 0.5);
}

TEST(EwmaPolicy, AnInsertionThatComesAfterNewerMissesCountsNothing) {
  EwmaPolicy policy = halving();
  policy.on_miss(ExpertIndex(3), 1);
  policy.on_miss(ExpertIndex(3), 2);
  policy.on_insert(ExpertIndex(3), 1);  // its read has ended only now
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(3)), 0.75);
}

TEST(EwmaPolicy, AbsentExpertsAreScoredAndARemovalForgetsNothing) {
  EwmaPolicy policy = halving();
  policy.on_miss(ExpertIndex(5), 1);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(5)), 0.5);
  policy.on_insert(ExpertIndex(5), 2);  // the miss that led to it has been counted
  policy.on_remove(ExpertIndex(5));
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(5)), 0.5);
  policy.on_miss(ExpertIndex(5), 3);
  EXPECT_DOUBLE_EQ(policy.score(ExpertIndex(5)), 0.625);
}

TEST(EwmaPolicy, RanksTheLowestScoreFirst) {
  EwmaPolicy policy = halving();
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1);
  policy.on_access(ExpertIndex(2), 2);  // 0.75 -> 0.375
  policy.on_access(ExpertIndex(0), 3);  // 0.125 + 0.5
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), experts({1, 2, 0}));
  EXPECT_EQ(ranked(policy, experts({2, 0}), 3), experts({2, 0}));
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 1), experts({1}));
}

TEST(EwmaPolicy, ManyOldUsesOutweighOneNewOneUnlikeUnderLru) {
  EwmaPolicy policy({.n_experts = 4, .n_slots = 2}, 0.98);
  policy.on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 20; ++step) policy.on_access(ExpertIndex(0), step);
  policy.on_insert(ExpertIndex(1), 30);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({1}));
}

TEST(EwmaPolicy, TiesGoToTheOlderUseThenToTheLowerIndex) {
  EwmaPolicy policy = halving();
  for (std::uint32_t value : {6, 2, 4}) policy.on_insert(ExpertIndex(value), 1);
  EXPECT_EQ(ranked(policy, experts({6, 4, 2}), 3), experts({2, 4, 6}));
  // So long ago that every score is 0: the order of use is still known.
  policy.on_access(ExpertIndex(2), 2);
  policy.on_access(ExpertIndex(0), 100'000);
  ASSERT_EQ(policy.score(ExpertIndex(2)), 0);
  ASSERT_EQ(policy.score(ExpertIndex(6)), 0);
  EXPECT_EQ(ranked(policy, experts({2, 6, 4}), 3), experts({4, 6, 2}));
}

TEST(EwmaPolicy, AGainIsTheNewcomersScoreLessTheVictims) {
  EwmaPolicy policy = halving();
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_access(ExpertIndex(0), 2);
  policy.on_miss(ExpertIndex(1), 2);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)), 0.5 - 0.75);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(7), ExpertIndex(0)), -0.75) << "never seen";
  policy.on_miss(ExpertIndex(1), 3);
  EXPECT_DOUBLE_EQ(policy.gain(ExpertIndex(1), ExpertIndex(0)), 0.75 - 0.375);
  EXPECT_EQ(policy.gain(ExpertIndex(6), ExpertIndex(7)), 0) << "nothing is known of either";
}

TEST(EwmaPolicy, TheGainOfAnExpertWhoseUseHasShiftedTurnsPositiveOnceAndStaysSo) {
  EwmaPolicy policy({.n_experts = 2, .n_slots = 1}, 0.98);
  policy.on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 300; ++step) policy.on_access(ExpertIndex(0), step);
  int turns = 0;
  bool was_positive = false;
  for (Step step = 301; step <= 600; ++step) {
    policy.on_miss(ExpertIndex(1), step);
    const bool is_positive = policy.gain(ExpertIndex(1), ExpertIndex(0)) > 0;
    if (is_positive != was_positive) ++turns;
    was_positive = is_positive;
  }
  EXPECT_EQ(turns, 1);
  EXPECT_TRUE(was_positive);
}

// The definition as a sum over all uses: what the running values, with their table of powers, must agree
// with.
TEST(EwmaPolicy, AgreesWithItsDefinitionOverGapsShortAndLong) {
  constexpr std::uint32_t kExperts = 12;
  for (const double decay : {0.5, 0.9, 0.98, 0.999}) {
    EwmaPolicy policy({.n_experts = kExperts, .n_slots = kExperts}, decay);
    std::map<std::uint32_t, std::vector<Step>> uses;
    std::mt19937 random(5);
    Step step = 0, newest = 0;
    for (int i = 0; i < 400; ++i) {
      step += random() % 10 == 0 ? 200 + random() % 200 : 1;  // the table ends at 256
      for (std::uint32_t value = 0; value < kExperts; ++value) {
        if (random() % kExperts > value) continue;
        policy.on_miss(ExpertIndex(value), step);
        uses[value].push_back(step);
        newest = step;  // a score is as of this one
      }
      for (std::uint32_t value = 0; value < kExperts; ++value) {
        double expected = 0;
        for (Step use : uses[value])
          expected += (1 - decay) * std::pow(decay, static_cast<double>(newest - use));
        ASSERT_NEAR(policy.score(ExpertIndex(value)), expected, 1e-9);
      }
    }
  }
}

TEST(EwmaPolicy, OptionsAreADecayInThousandths) {
  const PolicyShape shape{.n_experts = 4, .n_slots = 2};
  const auto score_after_one_use = [&](std::string_view options) {
    auto made = EwmaPolicy::make(options, shape);
    EXPECT_TRUE(made) << options;
    (*made)->on_insert(ExpertIndex(0), 1);
    return (*made)->gain(ExpertIndex(0), ExpertIndex(1));
  };
  EXPECT_DOUBLE_EQ(score_after_one_use(""), 1 - 0.97);
  EXPECT_DOUBLE_EQ(score_after_one_use("decay=500"), 0.5);
  EXPECT_DOUBLE_EQ(score_after_one_use("decay=999"), 1 - 0.999);
  const auto refused = [&](std::string_view options) {
    auto made = EwmaPolicy::make(options, shape);
    if (made) return std::string("accepted");
    EXPECT_EQ(made.error().code, FaultCode::kInvalid);
    return made.error().text;
  };
  for (const char* bad : {"decay=499", "decay=1000", "decay=0.98", "decay=-1", "decay="}) {
    EXPECT_THAT(refused(bad), HasSubstr("is not a whole number from 500 to 999")) << bad;
  }
  EXPECT_THAT(refused("halflife=4"), HasSubstr("no option 'halflife'; it has decay"));
  EXPECT_THAT(refused("decay"), HasSubstr("not KEY=VALUE"));
  EXPECT_THAT(refused("decay=980,decay=970"), HasSubstr("given twice"));
}

}  // namespace
}  // namespace moecached
