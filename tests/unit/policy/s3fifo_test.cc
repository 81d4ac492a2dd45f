#include "daemon/policy/s3fifo.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::Experts;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(S3FifoPolicy, WhatIsUsedOnceAtMostGoesFirst) {
  S3FifoPolicy policy({.n_experts = 16, .n_slots = 4}, 25);
  for (std::uint32_t value : {0, 1, 2, 3}) policy.on_insert(ExpertIndex(value), 1 + value);
  for (Step step : {10, 11}) policy.on_access(ExpertIndex(0), step);
  policy.on_access(ExpertIndex(1), 12);
  EXPECT_EQ(ranked(policy, experts({0, 1, 2, 3}), 4), experts({1, 2, 3, 0}));
}

TEST(S3FifoPolicy, AnExpertUsedTwiceMovesOnAndAScanDoesNotTouchIt) {
  S3FifoPolicy policy({.n_experts = 64, .n_slots = 10}, 10);
  Replay replay(policy, 10);
  for (std::uint32_t value = 0; value < 9; ++value) replay.step(experts({value}));
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t value = 0; value < 9; ++value) replay.step(experts({value}));
  }
  for (std::uint32_t value = 10; value < 60; ++value) {
    replay.step(experts({value}));
    for (std::uint32_t hot = 0; hot < 9; ++hot) {
      ASSERT_TRUE(testing_policies::contains(replay.residents(), ExpertIndex(hot))) << hot << " at " << value;
    }
  }
}

TEST(S3FifoPolicy, OneWhoseNameIsKnownEntersTheMainQueue) {
  S3FifoPolicy policy({.n_experts = 16, .n_slots = 4}, 25);
  Replay replay(policy, 4);
  for (std::uint32_t value : {0, 1, 2, 3}) replay.step(experts({value}));
  replay.step(experts({4}));
  ASSERT_EQ(replay.victims(), experts({0}));
  replay.step(experts({0}));  // back, into the main queue; 1 goes
  for (std::uint32_t value : {5, 6, 7}) replay.step(experts({value}));
  EXPECT_TRUE(testing_policies::contains(replay.residents(), ExpertIndex(0)));
  EXPECT_FALSE(testing_policies::contains(replay.residents(), ExpertIndex(4)));
}

TEST(S3FifoPolicy, RemembersAtMostThreeUses) {
  S3FifoPolicy policy({.n_experts = 8, .n_slots = 3}, 90);
  for (std::uint32_t value : {0, 1}) policy.on_insert(ExpertIndex(value), 1);
  for (Step step = 2; step < 50; ++step) policy.on_access(ExpertIndex(0), step);
  for (Step step : {50, 51, 52}) policy.on_access(ExpertIndex(1), step);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 2), experts({0, 1})) << "three uses are as good as fifty";
}

// As published, for one object at a time, but that moving on never evicts from the main queue by itself.
class PublishedS3Fifo {
 public:
  PublishedS3Fifo(std::size_t n_slots, std::size_t small) : n_slots_(n_slots), small_slots_(small) {}
  // Returns the victim; -1: none, as it hit or there was room.
  int access(std::uint32_t id) {
    for (auto* queue : {&small_, &main_}) {
      for (Entry& each : *queue) {
        if (each.id != id) continue;
        each.uses = std::min(each.uses + 1, 3);
        return -1;
      }
    }
    int victim = -1;
    while (victim < 0 && small_.size() + main_.size() == n_slots_) {
      victim = small_.size() >= small_slots_ ? evict_small() : evict_main();
    }
    const auto known = std::find(ghosts_.begin(), ghosts_.end(), id);
    if (known != ghosts_.end()) {
      ghosts_.erase(known);
      main_.push_back({id, 0});
    } else {
      small_.push_back({id, 0});
    }
    while (ghosts_.size() > n_slots_) ghosts_.pop_front();
    return victim;
  }

 private:
  struct Entry {
    std::uint32_t id;
    int uses;
  };
  int evict_small() {
    while (!small_.empty()) {
      const Entry tail = small_.front();
      small_.pop_front();
      if (tail.uses > 1) {
        main_.push_back({tail.id, 0});
        continue;
      }
      ghosts_.push_back(tail.id);
      return static_cast<int>(tail.id);
    }
    return -1;
  }
  int evict_main() {
    while (!main_.empty()) {
      const Entry tail = main_.front();
      main_.pop_front();
      if (tail.uses == 0) return static_cast<int>(tail.id);
      main_.push_back({tail.id, tail.uses - 1});
    }
    return -1;
  }
  std::size_t n_slots_, small_slots_;
  std::deque<Entry> small_, main_;  // oldest in front
  std::deque<std::uint32_t> ghosts_;
};

TEST(S3FifoPolicy, IsThePublishedAlgorithmWhereAStepIsOneExpert) {
  std::mt19937 random(29);
  for (const std::uint32_t n_slots : {4u, 12u, 20u}) {
    S3FifoPolicy policy({.n_experts = 64, .n_slots = n_slots}, 10);
    Replay replay(policy, n_slots);
    PublishedS3Fifo published(n_slots, std::max(1u, (n_slots * 10 + 50) / 100));
    int evictions = 0;
    for (int i = 0; i < 20'000; ++i) {
      const auto draw = [&] { return static_cast<std::uint32_t>(random() % 64); };
      const std::uint32_t id = std::min({draw(), draw(), draw()});
      replay.step(experts({id}));
      const int victim = published.access(id);
      ASSERT_EQ(replay.victims(), victim < 0 ? Experts{} : experts({static_cast<std::uint32_t>(victim)}))
          << i;
      evictions += victim >= 0;
    }
    EXPECT_GT(evictions, 1000);
  }
}

TEST(S3FifoPolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  S3FifoPolicy policy({.n_experts = 4, .n_slots = 2}, 10);
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
