#include "daemon/policy/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moecached {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr PolicyShape kShape{.n_experts = 8, .n_slots = 4};

std::string error_of(std::string_view spec, PolicyShape shape = kShape) {
  const auto policy = make_policy(spec, shape);
  if (policy) return "no error";
  EXPECT_EQ(policy.error().code, FaultCode::kInvalid);
  return policy.error().text;
}

TEST(PolicyRegistry, NamesEveryPolicy) {
  EXPECT_THAT(policy_names(), ElementsAre("arc", "ewma", "fifo", "learned", "lfu", "lru", "s3fifo", "sieve",
                                          "slru", "static", "wtinylfu"));
}

TEST(PolicyRegistry, MakesEveryPolicyThatItNames) {
  for (std::string_view name : policy_names()) {
    const auto policy = make_policy(name, kShape);
    ASSERT_TRUE(policy) << name;
    EXPECT_EQ((*policy)->name(), name);
  }
}

TEST(PolicyRegistry, TakesNamesInAnyCase) {
  for (std::string_view name : {"SLRU", "Slru", "slru"}) {
    const auto policy = make_policy(name, kShape);
    ASSERT_TRUE(policy) << name;
    EXPECT_EQ((*policy)->name(), "slru");
  }
  EXPECT_EQ(canonical_policy("SLRU:probation=20,admit=second-miss"), "slru:probation=20,admit=second-miss");
  EXPECT_EQ(error_of("SLRU:Probation=20"), "policy slru: no option 'Probation'; it has probation, admit");
}

TEST(PolicyRegistry, TakesOptionsBehindAColon) {
  for (std::string_view spec :
       {"lru:", "slru:", "slru:probation=50", "slru:admit=always", "slru:probation=20,admit=second-miss"}) {
    EXPECT_TRUE(make_policy(spec, kShape)) << spec;
  }
}

TEST(PolicyRegistry, AnUnknownNameIsAnErrorThatListsTheNames) {
  const std::string names =
      "; there are arc, ewma, fifo, learned, lfu, lru, s3fifo, sieve, slru, static, wtinylfu, and lib:NAME "
      "for a "
      "library";
  EXPECT_EQ(error_of("best"), "no policy 'best'" + names);
  EXPECT_EQ(error_of(""), "no policy ''" + names);
  EXPECT_EQ(error_of("LRUX"), "no policy 'lrux'" + names);
}

TEST(PolicyRegistry, AnUnknownOptionIsAnErrorThatListsTheKnownOnes) {
  EXPECT_EQ(error_of("lru:probation=20"), "policy lru: no option 'probation'; it has admit");
  EXPECT_EQ(error_of("slru:size=20"), "policy slru: no option 'size'; it has probation, admit");
}

TEST(PolicyRegistry, AnOptionOutOfRangeIsAnErrorThatSaysTheRange) {
  EXPECT_THAT(error_of("slru:probation=0"), HasSubstr("from 1 to 100"));
  EXPECT_THAT(error_of("slru:probation=101"), HasSubstr("from 1 to 100"));
  EXPECT_THAT(error_of("slru:admit=never"), HasSubstr("always, second-miss, value"));
}

TEST(PolicyRegistry, RefusesShapesWithoutASlotOrWithMoreSlotsThanExperts) {
  EXPECT_THAT(error_of("lru", {.n_experts = 4, .n_slots = 0}), HasSubstr("0 slots for 4 experts"));
  EXPECT_THAT(error_of("lru", {.n_experts = 4, .n_slots = 5}), HasSubstr("5 slots for 4 experts"));
  EXPECT_THAT(error_of("lru", {.n_experts = 0, .n_slots = 0}), HasSubstr("0 slots for 0 experts"));
}

}  // namespace
}  // namespace moecached
