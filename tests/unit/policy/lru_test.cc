#include "daemon/policy/lru.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace moecached {
namespace {

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

TEST(LruPolicy, EvictsTheExpertWhoseLastStepIsTheOldest) {
  LruPolicy policy({.n_experts = 8, .n_slots = 4});
  policy.on_insert(ExpertIndex(3), 1);
  policy.on_insert(ExpertIndex(1), 2);
  policy.on_insert(ExpertIndex(2), 3);
  policy.on_access(ExpertIndex(3), 4);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({1, 2, 3}));
  policy.on_access(ExpertIndex(1), 5);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 2), experts({2, 3}));
}

TEST(LruPolicy, OrdersTheExpertsOfOneStepByIndexWhateverTheOrderOfTheCalls) {
  LruPolicy policy({.n_experts = 8, .n_slots = 4});
  for (std::uint32_t value : {6, 0, 4, 2}) policy.on_insert(ExpertIndex(value), 1);
  EXPECT_EQ(ranked(policy, experts({4, 6, 2, 0}), 4), experts({0, 2, 4, 6}));
  for (std::uint32_t value : {4, 0}) policy.on_access(ExpertIndex(value), 2);
  EXPECT_EQ(ranked(policy, experts({0, 2, 4, 6}), 4), experts({2, 6, 0, 4}));
}

TEST(LruPolicy, RanksAnExpertThatArrivesLateByTheStepThatAskedForIt) {
  LruPolicy policy({.n_experts = 8, .n_slots = 4});
  policy.on_insert(ExpertIndex(1), 5);
  policy.on_insert(ExpertIndex(2), 3);
  EXPECT_EQ(ranked(policy, experts({1, 2}), 1), experts({2}));
}

TEST(LruPolicy, SkipsWhoIsNotACandidate) {
  LruPolicy policy({.n_experts = 8, .n_slots = 4});
  for (std::uint32_t value = 0; value < 4; ++value) policy.on_insert(ExpertIndex(value), value);
  EXPECT_EQ(ranked(policy, experts({3, 1}), 4), experts({1, 3}));
  EXPECT_TRUE(ranked(policy, {}, 4).empty());
  EXPECT_TRUE(ranked(policy, experts({1}), 0).empty());
}

TEST(LruPolicy, ChoosesWhatASortByStepAndIndexChoosesOverARandomRun) {
  constexpr std::uint32_t kExperts = 32, kSlots = 12;
  std::mt19937 random(11);
  LruPolicy policy({.n_experts = kExperts, .n_slots = kSlots});
  std::vector<std::pair<Step, std::uint32_t>> model;  // (last step, expert)
  for (Step step = 1; step < 5000; ++step) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t value = static_cast<std::uint32_t>(random() % kExperts);
      auto found =
          std::find_if(model.begin(), model.end(), [&](const auto& each) { return each.second == value; });
      if (found != model.end()) {
        found->first = step;
        policy.on_access(ExpertIndex(value), step);
        continue;
      }
      if (model.size() == kSlots) {
        std::vector<ExpertIndex> candidates;
        for (const auto& each : model) candidates.emplace_back(each.second);
        std::sort(model.begin(), model.end());
        const auto victims = ranked(policy, candidates, 3);
        ASSERT_EQ(victims, experts({model[0].second, model[1].second, model[2].second}));
        policy.on_remove(victims[0]);
        model.erase(model.begin());
      }
      policy.on_insert(ExpertIndex(value), step);
      model.emplace_back(step, value);
    }
  }
}

TEST(LruPolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  LruPolicy policy({.n_experts = 4, .n_slots = 2});
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
