#include "daemon/policy/sieve.h"

#include <gtest/gtest.h>

#include <deque>
#include <list>
#include <random>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::Experts;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(SievePolicy, EvictsTheOldestThatWasNotUsedSinceItsInsertion) {
  SievePolicy policy({.n_experts = 8, .n_slots = 4});
  for (std::uint32_t value : {3, 1, 2, 5}) policy.on_insert(ExpertIndex(value), 10 - value);
  // Inserted in the order 5 3 2 1.
  policy.on_access(ExpertIndex(5), 20);
  policy.on_access(ExpertIndex(2), 21);
  EXPECT_EQ(ranked(policy, experts({1, 2, 3, 5}), 4), experts({3, 1, 5, 2}));
}

TEST(SievePolicy, TheHandStaysWhereItEvictedAndTakesTheMarksItPasses) {
  SievePolicy policy({.n_experts = 10, .n_slots = 4});
  Replay replay(policy, 4);
  for (std::uint32_t value : {0, 1, 2, 3}) replay.step(experts({value}));
  replay.step(experts({0}));
  replay.step(experts({2}));
  replay.step(experts({4}));  // passes 0, whose mark goes, evicts 1
  EXPECT_EQ(replay.victims(), experts({1}));
  replay.step(experts({5}));  // goes on from 2: takes its mark, evicts 3, not the older 0
  EXPECT_EQ(replay.victims(), experts({3}));
  replay.step(experts({6}));  // 4 is behind 3 in the queue and has no mark
  EXPECT_EQ(replay.victims(), experts({4}));
  replay.step(experts({7}));
  EXPECT_EQ(replay.victims(), experts({5}));
  replay.step(experts({8}));
  EXPECT_EQ(replay.victims(), experts({6}));
  replay.step(experts({9}));
  EXPECT_EQ(replay.victims(), experts({7}));
}

TEST(SievePolicy, AskingDoesNotMoveTheHand) {
  SievePolicy policy({.n_experts = 8, .n_slots = 3});
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1 + value);
  policy.on_access(ExpertIndex(0), 9);
  const Experts first = ranked(policy, experts({0, 1, 2}), 3);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), first);
}

TEST(SievePolicy, UseInTheStepOfTheInsertionIsNoMark) {
  SievePolicy policy({.n_experts = 8, .n_slots = 2});
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_access(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(1), 2);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({0}));
}

TEST(SievePolicy, AMarkOfTheVeryStepIsNotTaken) {
  SievePolicy policy({.n_experts = 8, .n_slots = 3});
  Replay replay(policy, 3);
  for (std::uint32_t value : {0, 1, 2}) replay.step(experts({value}));
  replay.step(experts({0, 3}));  // the hand passes 0, used in this step, and evicts 1
  EXPECT_EQ(replay.victims(), experts({1}));
  replay.step(experts({4}));
  EXPECT_EQ(replay.victims(), experts({2}));
  replay.step(experts({5}));
  replay.step(experts({6}));
  EXPECT_EQ(replay.victims(), experts({4})) << "0 has kept its mark: 3 went, then 4";
}

// The algorithm as published, for one object at a time: a list with its newest in front, a hand that walks
// from the back.
class PublishedSieve {
 public:
  explicit PublishedSieve(std::size_t n_slots) : n_slots_(n_slots), hand_(list_.end()) {}
  // Returns the victim; -1: none.
  int access(int id) {
    for (Entry& each : list_) {
      if (each.id != id) continue;
      each.visited = true;
      return -1;
    }
    int victim = -1;
    if (list_.size() == n_slots_) {
      auto at = hand_ == list_.end() ? std::prev(list_.end()) : hand_;
      while (at->visited) {
        at->visited = false;
        at = at == list_.begin() ? std::prev(list_.end()) : std::prev(at);
      }
      victim = at->id;
      hand_ = at == list_.begin() ? list_.end() : std::prev(at);
      list_.erase(at);
    }
    list_.push_front({.id = id, .visited = false});
    return victim;
  }

 private:
  struct Entry {
    int id;
    bool visited;
  };
  std::size_t n_slots_;
  std::list<Entry> list_;
  std::list<Entry>::iterator hand_;
};

TEST(SievePolicy, IsThePublishedAlgorithmWhereAStepIsOneExpert) {
  std::mt19937 random(23);
  for (const std::uint32_t n_slots : {1u, 3u, 12u}) {
    SievePolicy policy({.n_experts = 32, .n_slots = n_slots});
    Replay replay(policy, n_slots);
    PublishedSieve published(n_slots);
    for (int i = 0; i < 20'000; ++i) {
      const auto id = static_cast<std::uint32_t>(std::min(random() % 32, random() % 32));
      replay.step(experts({id}));
      const int victim = published.access(static_cast<int>(id));
      ASSERT_EQ(replay.victims(), victim < 0 ? Experts{} : experts({static_cast<std::uint32_t>(victim)}))
          << i;
    }
  }
}

TEST(SievePolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  SievePolicy policy({.n_experts = 4, .n_slots = 2});
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
