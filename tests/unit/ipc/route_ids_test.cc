#include "daemon/ipc/route_ids.h"

#include <gmock/gmock.h>

#include <vector>

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class RouteIdsTest : public testing::Test {
 protected:
  Status take(std::uint32_t layer, const std::vector<std::uint32_t>& experts, std::uint32_t n_tokens = 1) {
    return ids_.take({.layer = layer, .experts = experts, .n_tokens = n_tokens});
  }
  // What is wrong; the decision leaves nothing behind.
  std::string refusal(std::uint32_t layer, const std::vector<std::uint32_t>& experts,
                      std::uint32_t n_tokens = 1) {
    const Status taken = take(layer, experts, n_tokens);
    EXPECT_FALSE(taken);
    EXPECT_THAT(ids_.distinct(), IsEmpty());
    return taken ? "" : taken.error().text;
  }
  const std::vector<LayerLimits> limits_ = {{.n_experts = 8, .n_parts = 3}, {.n_experts = 4, .n_parts = 3}};
  RouteIds ids_{limits_};
};

TEST_F(RouteIdsTest, EachExpertComesOnceInTheOrderOfTheTokens) {
  ASSERT_TRUE(take(0, {5, 2, 2, 7, 5, 0}, 3));
  EXPECT_THAT(ids_.distinct(), ElementsAre(5, 2, 7, 0));
  ASSERT_TRUE(take(1, {2}, 0));
  EXPECT_THAT(ids_.distinct(), ElementsAre(2)) << "an expert of the decision before is new again";
}

TEST_F(RouteIdsTest, WhatIsOutOfRangeIsNamedWithItsLimit) {
  EXPECT_THAT(refusal(2, {0}), HasSubstr("layer 2: the model has 2 MoE layers"));
  EXPECT_THAT(refusal(UINT32_MAX, {0}), HasSubstr("layer 4294967295"));
  EXPECT_THAT(refusal(1, {0, 4}), HasSubstr("expert 4: layer 1 has 4"));
  EXPECT_THAT(refusal(1, {UINT32_MAX}), HasSubstr("expert 4294967295"));
  EXPECT_THAT(refusal(0, {}), HasSubstr("a decision of 0 experts"));
  EXPECT_THAT(refusal(0, std::vector<std::uint32_t>(kRouteIdsMax + 1)), HasSubstr("65537 experts"));
  EXPECT_THAT(refusal(0, {1, 2, 3}, 2), HasSubstr("3 experts for 2 tokens"));
  EXPECT_THAT(refusal(0, {1}, UINT32_MAX), HasSubstr("1 experts for 4294967295 tokens"));
  EXPECT_TRUE(take(0, std::vector<std::uint32_t>(kRouteIdsMax, 7)));
  EXPECT_THAT(ids_.distinct(), ElementsAre(7));
}

}  // namespace
}  // namespace moecached
