#include "daemon/policy/use_rates.h"

#include <gtest/gtest.h>

#include <vector>

namespace moecached {
namespace {

TEST(UseRates, AgreeWithHandComputedAverages) {
  UseRates rates(3, 0.5);
  rates.use(ExpertIndex(0), 1);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(0)), 0.5);
  rates.use(ExpertIndex(0), 2);
  rates.use(ExpertIndex(0), 2);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(0)), 0.75);
  rates.use(ExpertIndex(1), 4);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(0)), 0.1875);
  EXPECT_EQ(rates.last_step(ExpertIndex(0)), 2u);
}

TEST(UseRates, BeforeNowLeavesOutTheUseOfTheNewestStep) {
  UseRates rates(2, 0.5);
  rates.use(ExpertIndex(0), 1);
  rates.use(ExpertIndex(0), 2);
  rates.use(ExpertIndex(1), 2);
  EXPECT_DOUBLE_EQ(rates.rate_before_now(ExpertIndex(0)), 0.25);
  EXPECT_DOUBLE_EQ(rates.rate_before_now(ExpertIndex(1)), 0);
  rates.use(ExpertIndex(1), 3);
  EXPECT_DOUBLE_EQ(rates.rate_before_now(ExpertIndex(0)), rates.rate(ExpertIndex(0)));
}

TEST(UseRates, GoOnFromASeedAndIgnoreWhatIsOlder) {
  UseRates rates(2, 0.5);
  const PastUse past[] = {{.uses_per_step = 0.4, .last_step = 7}, {}};
  rates.seed(past, 10);
  EXPECT_EQ(rates.last_step(ExpertIndex(0)), 7u);
  rates.use(ExpertIndex(0), 7);
  rates.use(ExpertIndex(1), 9);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(0)), 0.4);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(1)), 0);
  rates.use(ExpertIndex(0), 11);
  EXPECT_DOUBLE_EQ(rates.rate(ExpertIndex(0)), 0.7);
}

}  // namespace
}  // namespace moecached
