#include "daemon/residency/hit_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "daemon/residency/instant_pool.h"

namespace moecached {
namespace {

std::vector<ExpertIndex> ids(std::initializer_list<std::uint32_t> values) {
  return {values.begin(), values.end()};
}

TEST(HitCurve, CountsAUseAtTheSmallestPoolThatWouldHaveServedIt) {
  HitCurve curve(8);
  EXPECT_EQ(curve.uses(0, 8), 0);
  for (int round = 0; round < 50; ++round) {
    for (std::uint32_t expert : {0u, 1u, 2u}) curve.use(ids({expert}));
  }
  // Three in a circle: each is two others away.
  EXPECT_NEAR(curve.uses(2, 3), 1, 0.05);
  EXPECT_NEAR(curve.uses(0, 2), 0, 0.05);
  EXPECT_NEAR(curve.uses(3, 8), 0, 0.05);
  EXPECT_NEAR(curve.steps(), 150, 5);
}

TEST(HitCurve, FollowsWhatIsNew) {
  HitCurve curve(8);
  for (int i = 0; i < 20'000; ++i) curve.use(ids({0}));
  EXPECT_NEAR(curve.uses(0, 1), 1, 0.01);
  EXPECT_LE(curve.steps(), HitCurve::kMemory);
  for (std::uint32_t i = 0; i < 20'000; ++i) curve.use(ids({i % 2}));
  EXPECT_NEAR(curve.uses(1, 2), 1, 0.02) << "as it was long ago weighs little";
}

// The claim of the header, in full: one pass counts what a pool of every size does that loads all misses and
// evicts by ewma.
TEST(HitCurve, IsThatOfAnEwmaPoolOfEverySize) {
  constexpr std::uint32_t kExperts = 24, kTop = 3, kSteps = 3000;
  std::mt19937 random(7);
  // The smaller of two: some are in demand.
  const auto below = [&](std::uint32_t n) {
    return static_cast<std::uint32_t>(std::min(random() % n, random() % n));
  };
  std::vector<std::vector<ExpertIndex>> steps;
  for (std::uint32_t i = 0; i < kSteps; ++i) {
    std::vector<ExpertIndex> step;
    while (step.size() < kTop) {
      const std::uint32_t base = i / 500 % 2 * 5;  // the routing moves
      const ExpertIndex expert((below(kExperts) + base) % kExperts);
      if (std::find(step.begin(), step.end(), expert) == step.end()) step.push_back(expert);
    }
    steps.push_back(step);
  }
  HitCurve curve(kExperts);
  double fading = 0;
  for (const auto& step : steps) curve.use(step);
  for (std::uint32_t n = kTop; n <= kExperts; ++n) {
    auto pool = InstantPool::create({.layers = {{.n_experts = kExperts, .n_slots = n}}, .policy = "ewma"},
                                    MissMode::kPool);
    ASSERT_TRUE(pool);
    double hits = 0;
    fading = 0;
    for (const auto& step : steps) {
      hits = hits * (1 - 1 / HitCurve::kMemory) + (*pool)->event(LaneId(0), LayerIndex(0), step).hits;
      fading = fading * (1 - 1 / HitCurve::kMemory) + 1;
    }
    // Warm-up: the curve's pools begin with experts that nobody asked for.
    EXPECT_NEAR(curve.uses(0, n), hits / fading, 0.02) << n << " slots";
  }
}

TEST(HitCurve, SurvivesTheGrowthOfItsWeights) {
  HitCurve curve(4);
  for (std::uint32_t i = 0; i < 2'000'000; ++i) curve.use(ids({i % 3}));
  EXPECT_NEAR(curve.uses(2, 3), 1, 1e-3);
  EXPECT_TRUE(std::isfinite(curve.steps()));
}

}  // namespace
}  // namespace moecached
