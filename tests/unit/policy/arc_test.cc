#include "daemon/policy/arc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::Experts;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(ArcPolicy, WhatWasUsedOnceGoesBeforeWhatWasUsedAgain) {
  ArcPolicy policy({.n_experts = 8, .n_slots = 3});
  for (std::uint32_t value : {0, 1, 2}) policy.on_insert(ExpertIndex(value), 1 + value);
  policy.on_access(ExpertIndex(0), 5);
  EXPECT_EQ(ranked(policy, experts({0, 1, 2}), 3), experts({1, 2, 0}));
}

TEST(ArcPolicy, UseInTheStepOfTheInsertionIsTheSameEvent) {
  ArcPolicy policy({.n_experts = 8, .n_slots = 2});
  policy.on_insert(ExpertIndex(0), 1);
  policy.on_access(ExpertIndex(0), 1);
  policy.on_insert(ExpertIndex(1), 2);
  EXPECT_EQ(ranked(policy, experts({0, 1}), 1), experts({0}));
}

TEST(ArcPolicy, AMissOfWhatRecentLostMovesTheTargetUpAndOneOfWhatFrequentLostDown) {
  ArcPolicy policy({.n_experts = 16, .n_slots = 2});
  Replay replay(policy, 2);
  replay.step(experts({0}));
  replay.step(experts({0}));  // frequent
  replay.step(experts({1}));
  replay.step(experts({2}));  // 1 is lost by recent
  ASSERT_EQ(replay.victims(), experts({1}));
  EXPECT_EQ(policy.target(), 0);
  replay.step(experts({1}));
  EXPECT_EQ(policy.target(), 1);
  EXPECT_EQ(replay.victims(), experts({0}))
      << "recent, with one expert, is at its target: frequent has to give";
  replay.step(experts({0}));
  EXPECT_EQ(policy.target(), 0);
}

TEST(ArcPolicy, MissesThatAreNotInsertedMoveTheTargetOnceAStep) {
  ArcPolicy policy({.n_experts = 16, .n_slots = 4});
  Replay replay(policy, 4);
  replay.step(experts({0}));
  replay.step(experts({0}));
  for (std::uint32_t value : {1, 2, 3, 4}) replay.step(experts({value}));
  ASSERT_EQ(replay.victims(), experts({1}));
  policy.on_miss(ExpertIndex(1), 100);
  policy.on_miss(ExpertIndex(1), 100);
  EXPECT_EQ(policy.target(), 1);
  policy.on_miss(ExpertIndex(1), 101);
  EXPECT_EQ(policy.target(), 2);
}

// As published, for one object at a time. Vectors, oldest first.
class PublishedArc {
 public:
  explicit PublishedArc(std::size_t c) : c_(c) {}
  void access(std::uint32_t x) {
    if (take(t1_, x) || take(t2_, x)) {
      t2_.push_back(x);
    } else if (has(b1_, x)) {
      p_ = std::min(static_cast<double>(c_), p_ + std::max(1.0, ratio(b2_, b1_)));
      replace(false);
      take(b1_, x);
      t2_.push_back(x);
    } else if (has(b2_, x)) {
      p_ = std::max(0.0, p_ - std::max(1.0, ratio(b1_, b2_)));
      replace(true);
      take(b2_, x);
      t2_.push_back(x);
    } else {
      if (t1_.size() + b1_.size() == c_) {
        if (t1_.size() < c_) {
          b1_.erase(b1_.begin());
          replace(false);
        } else {
          t1_.erase(t1_.begin());
        }
      } else if (const std::size_t all = t1_.size() + t2_.size() + b1_.size() + b2_.size(); all >= c_) {
        if (all == 2 * c_) b2_.erase(b2_.begin());
        replace(false);
      }
      t1_.push_back(x);
    }
  }
  [[nodiscard]] Experts residents() const {
    Experts all;
    for (const auto* list : {&t1_, &t2_})
      for (std::uint32_t x : *list) all.emplace_back(x);
    std::sort(all.begin(), all.end());
    return all;
  }
  [[nodiscard]] double target() const { return p_; }

 private:
  using List = std::vector<std::uint32_t>;
  static bool has(const List& list, std::uint32_t x) {
    return std::find(list.begin(), list.end(), x) != list.end();
  }
  static bool take(List& list, std::uint32_t x) { return std::erase(list, x) > 0; }
  static double ratio(const List& a, const List& b) {
    return static_cast<double>(a.size()) / static_cast<double>(b.size());
  }
  void replace(bool in_b2) {
    if (t1_.size() + t2_.size() < c_) return;
    const auto n = static_cast<double>(t1_.size());
    if (!t1_.empty() && (n > p_ || (in_b2 && n == p_))) {
      b1_.push_back(t1_.front());
      t1_.erase(t1_.begin());
    } else {
      b2_.push_back(t2_.front());
      t2_.erase(t2_.begin());
    }
  }
  std::size_t c_;
  double p_ = 0;
  List t1_, t2_, b1_, b2_;
};

TEST(ArcPolicy, IsThePublishedAlgorithmWhereAStepIsOneExpert) {
  std::mt19937 random(31);
  for (const std::uint32_t n_slots : {2u, 5u, 16u}) {
    ArcPolicy policy({.n_experts = 48, .n_slots = n_slots});
    Replay replay(policy, n_slots);
    PublishedArc published(n_slots);
    for (int i = 0; i < 20'000; ++i) {
      const auto id =
          static_cast<std::uint32_t>((std::min(random() % 48, random() % 48) + (i / 5000) * 9) % 48);
      replay.step(experts({id}));
      published.access(id);
      Experts residents = replay.residents();
      std::sort(residents.begin(), residents.end());
      ASSERT_EQ(residents, published.residents()) << "access " << i << ", " << n_slots << " slots";
      ASSERT_DOUBLE_EQ(policy.target(), published.target()) << i;
    }
  }
}

TEST(ArcPolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  ArcPolicy policy({.n_experts = 4, .n_slots = 2});
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
