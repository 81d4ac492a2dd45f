// Time is given by the test: a link of 1 GB/s, so that a byte takes a nanosecond and a burst is 2,000,000
// bytes.
#include "daemon/ipc/upload_budget.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

constexpr double kRate = 1e9;
constexpr std::uint64_t kBurst = 2'000'000;
constexpr std::uint64_t kMs = 1'000'000;  // ns
constexpr double kBackground = 0.06;      // as measured; uploads cost this much of an otherwise idle link

class UploadBudgetTest : public ::testing::Test {
 protected:
  static UploadBudget budget(double max_slowdown) {
    return UploadBudget({.link_rate = kRate, .max_slowdown = max_slowdown});
  }
  // The most that it allows now, up to a burst.
  static std::uint64_t allowance(const UploadBudget& budget) {
    std::uint64_t low = 0, high = kBurst + 1;
    if (!budget.allows(low)) return 0;
    while (high - low > 1) {
      const std::uint64_t middle = (low + high) / 2;
      (budget.allows(middle) ? low : high) = middle;
    }
    return low;
  }
  // Turns of 1 ms in which kernels read so many bytes in place.
  void turns(UploadBudget& budget, int n, bool active, std::uint64_t read_in_place = 0) {
    for (int i = 0; i < n; ++i) {
      budget.read_in_place(read_in_place);
      budget.advance(now_ += kMs, active);
    }
  }
  // Uploads whatever is allowed, turn by turn, and returns how much that was.
  std::uint64_t uploads(UploadBudget& budget, int n_turns, std::uint64_t read_in_place) {
    std::uint64_t sum = 0;
    for (int i = 0; i < n_turns; ++i) {
      turns(budget, 1, true, read_in_place);
      const std::uint64_t bytes = allowance(budget);
      budget.uploaded(bytes);
      sum += bytes;
    }
    return sum;
  }

  std::uint64_t now_ = 1'000'000'000;
};

TEST_F(UploadBudgetTest, AllowsNothingBeforeTimeHasPassed) {
  UploadBudget b = budget(0.05);
  EXPECT_EQ(allowance(b), 0u);
  b.advance(now_, true);  // the first time is no span yet
  EXPECT_EQ(allowance(b), 0u);
}

TEST_F(UploadBudgetTest, ABurstIsAllowedAtOnceWhileNobodyComputes) {
  UploadBudget b = budget(0.05);
  b.advance(now_, false);
  EXPECT_EQ(allowance(b), kBurst);
  b.uploaded(kBurst);
  EXPECT_EQ(allowance(b), 0u);
  turns(b, 1, false);
  EXPECT_EQ(allowance(b), kBurst);
}

TEST_F(UploadBudgetTest, AnUploadCostsItsTimeTimesTheBackgroundWhileTheLinkIsIdle) {
  UploadBudget b = budget(0.03);
  turns(b, 1, true);
  turns(b, 1, true);
  EXPECT_NEAR(static_cast<double>(allowance(b)), 1e-3 * kRate * 0.03 / kBackground, 2);  // half the link
}

TEST_F(UploadBudgetTest, OnABusyLinkASlowdownBuysLess) {
  for (const double slowdown : {0.01, 0.05, 0.2}) {
    for (const double busy : {0.0, 0.25, 0.5, 0.9}) {
      UploadBudget b = budget(slowdown);
      const auto reads = static_cast<std::uint64_t>(busy * 1e-3 * kRate);
      turns(b, 1000, true, reads);
      b.uploaded(allowance(b));
      const double expected = 1.0 * kRate * std::min(1.0, slowdown / (busy + kBackground));
      EXPECT_NEAR(static_cast<double>(uploads(b, 1000, reads)), expected, 0.03 * expected)
          << slowdown << " of a client's time, link busy " << busy;
    }
  }
}

TEST_F(UploadBudgetTest, NoMoreThanTheLinkCarriesHoweverMuchSlowdownIsAllowed) {
  UploadBudget b = budget(0.5);  // more than the background costs
  turns(b, 2, true);
  EXPECT_NEAR(static_cast<double>(allowance(b)), 1e-3 * kRate, 2);
}

TEST_F(UploadBudgetTest, ASlowdownOfNothingAllowsNothingEvenWhileNobodyComputes) {
  for (const double slowdown : {0.0, -1.0}) {
    UploadBudget b = budget(slowdown);
    turns(b, 100, true);
    turns(b, 100, false);
    EXPECT_TRUE(b.allows(0));
    EXPECT_FALSE(b.allows(1));
  }
}

TEST_F(UploadBudgetTest, ASlowdownOfAllIsABurstEachTurnWhateverTheLinkDoes) {
  for (const double slowdown : {1.0, 2.0}) {
    UploadBudget b = budget(slowdown);
    turns(b, 200, true, kMs);
    for (int i = 0; i < 10; ++i) {
      EXPECT_EQ(allowance(b), kBurst);
      b.uploaded(kBurst);
      turns(b, 1, true, kMs);
    }
  }
}

TEST_F(UploadBudgetTest, SavesUpNoMoreThanABurst) {
  UploadBudget b = budget(0.05);
  turns(b, 10'000, true);
  EXPECT_EQ(allowance(b), kBurst);
  for (const bool active : {true, false}) {
    b.advance(now_ += 3'600'000 * kMs, active);
    EXPECT_EQ(allowance(b), kBurst);
    b.uploaded(kBurst);
    EXPECT_FALSE(b.allows(1));
  }
}

TEST_F(UploadBudgetTest, AnExpertLargerThanABurstWaitsForAWholeOneAndIsPaidForAfterwards) {
  UploadBudget b = budget(0.03);  // 500,000 bytes each turn
  const std::uint64_t bytes = 3 * kBurst;
  EXPECT_FALSE(b.allows(bytes));
  turns(b, 4, true);  // the first is no span yet
  EXPECT_FALSE(b.allows(bytes));
  turns(b, 2, true);
  ASSERT_TRUE(b.allows(bytes));
  b.uploaded(bytes);
  turns(b, 11, true);
  EXPECT_FALSE(b.allows(bytes));
  turns(b, 2, true);
  EXPECT_TRUE(b.allows(bytes)) << "12 turns are what it took";
}

TEST_F(UploadBudgetTest, WhatWasUploadedBeyondTheAllowanceIsWaitedFor) {
  UploadBudget b = budget(0.03);  // 500,000 bytes each turn
  turns(b, 2, true);
  b.uploaded(1'750'000);  // of 500,000: into free slots nobody asks
  turns(b, 2, true);
  EXPECT_FALSE(b.allows(0));
  turns(b, 1, true);
  EXPECT_NEAR(static_cast<double>(allowance(b)), 250'000, 5);
}

TEST_F(UploadBudgetTest, WhenAClientBeginsToComputeTheBurstThatIsLeftIsAllItGets) {
  UploadBudget b = budget(0.03);
  turns(b, 10, false);
  b.uploaded(kBurst);
  turns(b, 1, true);
  EXPECT_NEAR(static_cast<double>(allowance(b)), 500'000, 5);
}

TEST_F(UploadBudgetTest, LinkBusyIsTheShareOfTheRateThatReadsInPlaceTake) {
  UploadBudget b = budget(0.05);
  EXPECT_EQ(b.link_busy(), 0);
  b.read_in_place(1000);
  EXPECT_EQ(b.link_busy(), 0) << "no time has passed";
  for (const double share : {0.5, 0.1, 0.8, 0.0}) {
    turns(b, 2000, true, static_cast<std::uint64_t>(share * 1e-3 * kRate));
    EXPECT_NEAR(b.link_busy(), share, 0.02);
  }
}

TEST_F(UploadBudgetTest, LinkBusyIsNeverMoreThanOne) {
  UploadBudget b = budget(0.05);
  turns(b, 500, true, 10 * kMs);
  EXPECT_EQ(b.link_busy(), 1);
}

TEST_F(UploadBudgetTest, LinkBusyFollowsWithinATenthOfASecond) {
  UploadBudget b = budget(0.05);
  turns(b, 2000, true, kMs / 2);
  turns(b, 100, true, 0);
  EXPECT_GT(b.link_busy(), 0.1) << "a token's pause is not forgotten at once";
  EXPECT_LT(b.link_busy(), 0.25);
  b.advance(now_ += 100 * kMs, true);  // one turn as long as the window
  EXPECT_NEAR(b.link_busy(), 0, 1e-9);
}

}  // namespace
}  // namespace moecached
