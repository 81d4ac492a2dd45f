#include "daemon/policy/next_layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace moecached {
namespace {

using Set = std::vector<ExpertIndex>;

Set ids(std::initializer_list<std::uint32_t> values) {
  Set out;
  for (const std::uint32_t value : values) out.emplace_back(value);
  return out;
}

TEST(NextLayerPredictor, SaysLittleOfWhatItHasNeverSeen) {
  NextLayerPredictor predictor(32, 32);
  for (const float likelihood : predictor.predict(ids({1, 2, 3, 4}))) {
    EXPECT_GE(likelihood, 0.0F);
    EXPECT_LT(likelihood, 0.1F);
  }
}

TEST(NextLayerPredictor, LearnsWhichExpertsFollowWhich) {
  NextLayerPredictor predictor(32, 32);
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const std::uint32_t token = random() % 8;
    predictor.teach(ids({4 * token, 4 * token + 1}), ids({(4 * token + 9) % 32, (4 * token + 10) % 32}));
  }
  const auto likelihood = predictor.predict(ids({8, 9}));
  for (std::uint32_t e = 0; e < 32; ++e) {
    if (e == 17 || e == 18) {
      EXPECT_GT(likelihood[e], 0.7F) << e;
    } else {
      EXPECT_LT(likelihood[e], 0.2F) << e;
    }
  }
}

TEST(NextLayerPredictor, ForgetsWhatDoesNotHoldAnyMore) {
  NextLayerPredictor predictor(16, 16);
  for (int i = 0; i < 300; ++i) predictor.teach(ids({i % 2 == 0 ? 1u : 2u}), ids({i % 2 == 0 ? 5u : 6u}));
  EXPECT_GT(predictor.predict(ids({1}))[5], 0.7F);
  for (int i = 0; i < 300; ++i) predictor.teach(ids({i % 2 == 0 ? 1u : 2u}), ids({i % 2 == 0 ? 6u : 5u}));
  EXPECT_LT(predictor.predict(ids({1}))[5], 0.3F);
  EXPECT_GT(predictor.predict(ids({1}))[6], 0.7F);
}

// It is compared with what a victim is worth, so it must be a probability and no mere score.
TEST(NextLayerPredictor, IsRightAsOftenAsItSays) {
  NextLayerPredictor predictor(16, 16);
  std::mt19937 random(2);
  double said = 0, came = 0;
  for (int i = 0; i < 6000; ++i) {
    const std::uint32_t source = random() % 4;
    // Expert 8 + source follows three times out of four, else anything.
    const std::uint32_t used = random() % 4 != 0 ? 8 + source : random() % 8;
    if (i > 1000) {
      said += predictor.predict(ids({source}))[8 + source];
      came += used == 8 + source ? 1 : 0;
    }
    predictor.teach(ids({source}), ids({used}));
  }
  EXPECT_NEAR(said / 4999, came / 4999, 0.03);
  EXPECT_NEAR(came / 4999, 0.75, 0.03);
}

TEST(NextLayerPredictor, OfWideLayersGoesByTheTokenBefore) {
  NextLayerPredictor predictor(512, 512);
  for (int i = 0; i < 400; ++i) predictor.teach(ids({static_cast<std::uint32_t>(i % 512)}), ids({400, 401}));
  const auto likelihood = predictor.predict(ids({3}));
  EXPECT_GT(likelihood[400], 0.7F);
  EXPECT_LT(likelihood[3], 0.1F);
}

TEST(NextLayerPredictor, DoesTheSameWithTheSameEvents) {
  NextLayerPredictor a(24, 24), b(24, 24);
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const Set source = ids({static_cast<std::uint32_t>(random() % 24)});
    const Set used = ids({static_cast<std::uint32_t>(random() % 24)});
    a.teach(source, used);
    b.teach(source, used);
    ASSERT_TRUE(std::ranges::equal(a.predict(source), b.predict(source)));
  }
}

}  // namespace
}  // namespace moecached
