#include "daemon/policy/slru.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <vector>

#include "daemon/policy/lru.h"

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

TEST(SlruPolicy, ProtectsFourFifthsOfTheSlotsByDefaultAndLeavesProbationAtLeastOne) {
  const auto share = [](std::uint32_t n_slots, SlruOptions options) {
    return SlruPolicy({.n_experts = 4096, .n_slots = n_slots}, options).protected_slots();
  };
  EXPECT_EQ(share(1, {}), 0u);
  EXPECT_EQ(share(2, {}), 1u);
  EXPECT_EQ(share(8, {}), 6u);
  EXPECT_EQ(share(10, {}), 8u);
  EXPECT_EQ(share(100, {}), 80u);
  EXPECT_EQ(share(100, {.probation_percent = 100}), 0u);
  EXPECT_EQ(share(4096, {.probation_percent = 1}), 4055u);
}

TEST(SlruPolicy, AScanDoesNotPushOutWhatWasUsedTwice) {
  SlruPolicy policy({.n_experts = 64, .n_slots = 10}, {});
  for (std::uint32_t value = 0; value < 8; ++value) policy.on_insert(ExpertIndex(value), 1);
  for (std::uint32_t value = 0; value < 8; ++value) policy.on_access(ExpertIndex(value), 2);
  policy.on_insert(ExpertIndex(8), 3);
  policy.on_insert(ExpertIndex(9), 4);
  std::vector<ExpertIndex> residents;
  for (std::uint32_t value = 0; value < 10; ++value) residents.emplace_back(value);
  for (std::uint32_t value = 10; value < 60; ++value) {
    const auto victim = ranked(policy, residents, 1);
    ASSERT_EQ(victim, experts({value - 2}));
    policy.on_remove(victim[0]);
    std::replace(residents.begin(), residents.end(), victim[0], ExpertIndex(value));
    policy.on_insert(ExpertIndex(value), value);
  }
}

TEST(SlruPolicy, UseInTheStepOfTheInsertionIsTheSameEventAndDoesNotProtect) {
  SlruPolicy policy({.n_experts = 8, .n_slots = 5}, {});
  policy.on_insert(ExpertIndex(1), 1);
  policy.on_access(ExpertIndex(1), 1);
  policy.on_insert(ExpertIndex(2), 2);
  EXPECT_EQ(ranked(policy, experts({1, 2}), 1), experts({1}));
  policy.on_access(ExpertIndex(1), 3);
  EXPECT_EQ(ranked(policy, experts({1, 2}), 1), experts({2}));
}

TEST(SlruPolicy, DemotesTheOldestProtectedExpertToTheNewestEndOfProbation) {
  SlruPolicy policy({.n_experts = 8, .n_slots = 3}, {.probation_percent = 34});
  ASSERT_EQ(policy.protected_slots(), 2u);
  for (std::uint32_t value : {1, 2, 3}) policy.on_insert(ExpertIndex(value), 1);
  policy.on_access(ExpertIndex(1), 2);
  policy.on_access(ExpertIndex(2), 3);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({3, 1, 2}));
  policy.on_access(ExpertIndex(3), 4);  // 1 is demoted
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({1, 2, 3}));
  policy.on_access(ExpertIndex(1), 5);  // and comes back: 2 is demoted
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({2, 3, 1}));
}

TEST(SlruPolicy, AnExpertDemotedInTheStepThatUsesItIsProtectedAgain) {
  SlruPolicy policy({.n_experts = 8, .n_slots = 3}, {.probation_percent = 34});
  for (std::uint32_t value : {1, 2, 3}) policy.on_insert(ExpertIndex(value), 1);
  policy.on_access(ExpertIndex(1), 2);
  policy.on_access(ExpertIndex(2), 3);
  policy.on_access(ExpertIndex(3), 4);  // demotes 1, which the same step uses
  policy.on_access(ExpertIndex(1), 4);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3}), 3), experts({2, 1, 3}));
}

TEST(SlruPolicy, OneSlotWorks) {
  SlruPolicy policy({.n_experts = 3, .n_slots = 1}, {});
  policy.on_insert(ExpertIndex(2), 1);
  policy.on_access(ExpertIndex(2), 2);
  policy.on_access(ExpertIndex(2), 3);
  EXPECT_EQ(ranked(policy, experts({2}), 1), experts({2}));
}

// The definition again, as slow lists: what the intrusive arrays must agree with.
struct SlowSlru {
  struct Entry {
    Step entered, used;
    std::uint32_t expert;
  };
  std::size_t protected_slots;
  std::vector<Entry> probation, guarded;

  static auto position(std::vector<Entry>& list, std::uint32_t expert) {
    return std::find_if(list.begin(), list.end(), [&](const Entry& each) { return each.expert == expert; });
  }
  static void sort(std::vector<Entry>& list) {
    std::sort(list.begin(), list.end(), [](const Entry& a, const Entry& b) {
      return a.entered != b.entered ? a.entered < b.entered : a.expert < b.expert;
    });
  }
  [[nodiscard]] bool has(std::uint32_t expert) {
    return position(probation, expert) != probation.end() || position(guarded, expert) != guarded.end();
  }
  void access(std::uint32_t expert, Step step) {
    auto& from = position(guarded, expert) != guarded.end() ? guarded : probation;
    auto at = position(from, expert);
    if (at->used == step) return;
    from.erase(at);
    guarded.push_back({.entered = step, .used = step, .expert = expert});
    sort(guarded);
    if (guarded.size() > protected_slots) {
      probation.push_back(guarded.front());
      probation.back().entered = step;
      guarded.erase(guarded.begin());
    }
  }
  [[nodiscard]] std::vector<ExpertIndex> order() {
    sort(probation);
    std::vector<ExpertIndex> out;
    for (const Entry& each : probation) out.emplace_back(each.expert);
    for (const Entry& each : guarded) out.emplace_back(each.expert);
    return out;
  }
  void remove(std::uint32_t expert) {
    auto& from = position(guarded, expert) != guarded.end() ? guarded : probation;
    from.erase(position(from, expert));
  }
};

TEST(SlruPolicy, AgreesWithItsDefinitionOverARandomRun) {
  constexpr std::uint32_t kExperts = 32, kSlots = 12;
  std::mt19937 random(13);
  SlruPolicy policy({.n_experts = kExperts, .n_slots = kSlots}, {});
  SlowSlru slow{.protected_slots = policy.protected_slots(), .probation = {}, .guarded = {}};
  std::vector<ExpertIndex> residents;
  for (Step step = 1; step < 5000; ++step) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t value =
          static_cast<std::uint32_t>(std::min(random() % kExperts, random() % kExperts));
      if (slow.has(value)) {
        slow.access(value, step);
        policy.on_access(ExpertIndex(value), step);
        continue;
      }
      if (residents.size() == kSlots) {
        const auto victims = ranked(policy, residents, kSlots);
        ASSERT_EQ(victims, slow.order());
        policy.on_remove(victims[0]);
        slow.remove(victims[0].value);
        std::erase(residents, victims[0]);
      }
      policy.on_insert(ExpertIndex(value), step);
      slow.probation.push_back({.entered = step, .used = step, .expert = value});
      residents.emplace_back(value);
    }
  }
}

// Hits of a policy on sets of experts, looked up together and then updated.
std::uint64_t hits_of(EvictionPolicy& policy, std::uint32_t n_slots,
                      const std::vector<std::vector<ExpertIndex>>& run) {
  std::vector<ExpertIndex> residents;
  std::uint64_t hits = 0;
  Step step = 0;
  for (const auto& set : run) {
    ++step;
    std::vector<ExpertIndex> missing;
    for (ExpertIndex expert : set) {
      if (std::find(residents.begin(), residents.end(), expert) == residents.end()) {
        missing.push_back(expert);
      } else {
        ++hits;
        policy.on_access(expert, step);
      }
    }
    std::vector<ExpertIndex> candidates;
    for (ExpertIndex expert : residents) {
      if (std::find(set.begin(), set.end(), expert) == set.end()) candidates.push_back(expert);
    }
    const std::size_t n_free = n_slots - residents.size();
    for (ExpertIndex victim : ranked(policy, candidates, missing.size() - std::min(n_free, missing.size()))) {
      policy.on_remove(victim);
      std::erase(residents, victim);
    }
    for (ExpertIndex expert : missing) {
      policy.on_insert(expert, step);
      residents.push_back(expert);
    }
  }
  return hits;
}

TEST(SlruPolicy, BeatsLruOnSkewedRoutingWithDrift) {
  constexpr std::uint32_t kExperts = 32, kSlots = 8;
  std::mt19937 random(17);
  std::vector<std::vector<ExpertIndex>> run;
  for (int token = 0; token < 20000; ++token) {
    const std::uint32_t shift = static_cast<std::uint32_t>(token / 4000) * 5;
    std::vector<ExpertIndex> set;
    while (set.size() < 4) {
      const auto draw = [&] { return static_cast<std::uint32_t>(random() % kExperts); };
      const ExpertIndex expert((std::min({draw(), draw(), draw()}) + shift) % kExperts);
      if (std::find(set.begin(), set.end(), expert) == set.end()) set.push_back(expert);
    }
    run.push_back(set);
  }
  LruPolicy lru({.n_experts = kExperts, .n_slots = kSlots});
  SlruPolicy slru({.n_experts = kExperts, .n_slots = kSlots}, {});
  EXPECT_GT(hits_of(slru, kSlots, run), hits_of(lru, kSlots, run));
}

TEST(SlruPolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  SlruPolicy policy({.n_experts = 4, .n_slots = 2}, {});
  policy.on_insert(ExpertIndex(1), 1);
  policy.on_insert(ExpertIndex(2), 1);
  policy.on_access(ExpertIndex(2), 2);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 3), "CHECK failed");
  EXPECT_DEATH(policy.on_insert(ExpertIndex(2), 3), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 3), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(3)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
