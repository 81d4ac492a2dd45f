#include "daemon/policy/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/policy/second_miss_admitter.h"
#include "daemon/policy/value_admitter.h"
#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using ::testing::HasSubstr;
using testing_policies::contains;
using testing_policies::Experts;
using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

std::unique_ptr<EvictionPolicy> make(std::string_view spec, PolicyShape shape) {
  auto made = make_policy(spec, shape);
  EXPECT_TRUE(made) << spec;
  return std::move(made).value();
}

TEST(Admission, EverySpecTakesItAndAWrongWordNamesTheRightOnes) {
  const PolicyShape shape{.n_experts = 8, .n_slots = 4};
  for (std::string_view name : policy_names()) {
    for (std::string_view word : {"always", "second-miss", "value"}) {
      const std::string spec = std::string(name) + ":admit=" + std::string(word);
      const auto made = make_policy(spec, shape);
      ASSERT_TRUE(made) << spec;
      EXPECT_EQ((*made)->name(), name);
    }
    const auto refused = make_policy(std::string(name) + ":admit=never", shape);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().text, HasSubstr("admit=never is not one of always, second-miss, value"));
  }
  EXPECT_TRUE(make_policy("lfu:halve=64,admit=value", shape));
  EXPECT_TRUE(make_policy("lfu:admit=value,halve=64", shape));
  EXPECT_FALSE(make_policy("lru:admit=value,admit=value", shape));
}

TEST(SecondMiss, PutsAFirstTimeExpertAtTheEvictionEnd) {
  const auto policy = make("slru:admit=second-miss", {.n_experts = 8, .n_slots = 4});
  policy->on_insert(ExpertIndex(5), 1);
  policy->on_insert(ExpertIndex(1), 2);
  policy->on_insert(ExpertIndex(3), 3);
  EXPECT_EQ(ranked(*policy, experts({1, 3, 5}), 3), experts({3, 1, 5}));
}

TEST(SecondMiss, AdmitsAnExpertReadAgainWhileItIsRemembered) {
  const auto policy = make("slru:admit=second-miss", {.n_experts = 8, .n_slots = 4});
  policy->on_insert(ExpertIndex(5), 1);
  policy->on_remove(ExpertIndex(5));
  policy->on_insert(ExpertIndex(1), 2);
  policy->on_insert(ExpertIndex(5), 3);
  EXPECT_EQ(ranked(*policy, experts({1, 5}), 2), experts({1, 5}));
  policy->on_remove(ExpertIndex(5));  // its name was used up: the next read is a first one again
  policy->on_insert(ExpertIndex(5), 4);
  EXPECT_EQ(ranked(*policy, experts({1, 5}), 2), experts({5, 1}));
}

TEST(SecondMiss, ForgetsTheOldestNameBeyondOnePerSlot) {
  const auto policy = make("slru:admit=second-miss", {.n_experts = 16, .n_slots = 2});
  for (std::uint32_t value = 0; value < 4; ++value) {
    policy->on_insert(ExpertIndex(value), 1 + value);
    policy->on_remove(ExpertIndex(value));
  }
  policy->on_insert(ExpertIndex(9), 9);  // only 2 and 3 are remembered from here on
  policy->on_insert(ExpertIndex(3), 10);
  EXPECT_EQ(ranked(*policy, experts({9, 3}), 2), experts({9, 3}));
  policy->on_remove(ExpertIndex(3));
  policy->on_insert(ExpertIndex(1), 11);
  EXPECT_EQ(ranked(*policy, experts({9, 1}), 2), experts({1, 9}));
}

TEST(SecondMiss, AGuestThatIsUsedLaterIsAdmittedWithItsInsertionAndItsUse) {
  const auto policy = make("slru:probation=34,admit=second-miss", {.n_experts = 8, .n_slots = 3});
  for (std::uint32_t value : {1, 2, 3}) policy->on_insert(ExpertIndex(value), value);
  policy->on_access(ExpertIndex(3), 3);
  EXPECT_EQ(ranked(*policy, experts({1, 2, 3}), 3), experts({3, 2, 1}))
      << "the same event: still guests, all";
  policy->on_access(ExpertIndex(3), 4);
  EXPECT_EQ(ranked(*policy, experts({1, 2, 3}), 3), experts({2, 1, 3}));
}

TEST(SecondMiss, WhereMissesAreReadInPlaceTheFirstOneGainsNothing) {
  const auto policy = make("lru:admit=second-miss", {.n_experts = 8, .n_slots = 2});
  policy->on_miss(ExpertIndex(5), 1);
  EXPECT_LE(policy->gain(ExpertIndex(5), ExpertIndex(0)), 0);
  policy->on_miss(ExpertIndex(5), 1);
  EXPECT_LE(policy->gain(ExpertIndex(5), ExpertIndex(0)), 0) << "the same step";
  policy->on_miss(ExpertIndex(5), 2);
  EXPECT_GT(policy->gain(ExpertIndex(5), ExpertIndex(0)), 0);
  EXPECT_LE(policy->gain(ExpertIndex(6), ExpertIndex(0)), 0) << "never missed";
}

TEST(SecondMiss, KeepsALoopTooLongForTheSlotsFromPushingOutWhatIsUsed) {
  const auto plain = make("lru", {.n_experts = 64, .n_slots = 8});
  const auto guarded = make("lru:admit=second-miss", {.n_experts = 64, .n_slots = 8});
  const auto hits = [](EvictionPolicy& policy) {
    Replay replay(policy, 8);
    std::size_t n = 0;
    for (std::uint32_t i = 0; i < 3000; ++i) {
      n += replay.step(experts({i % 4 == 0 ? (i / 4) % 5 : 10 + i % 50}));
    }
    return n;
  };
  EXPECT_GT(hits(*guarded), hits(*plain) + 500);
}

constexpr PolicyShape kShape{.n_experts = 4, .n_slots = 2};

TEST(ValueAdmitter, WeighsWhatIsSavedAgainstTheUploadAsFarAsTheLinkIsBusy) {
  ValueAdmitter admitter(kShape);
  for (Step step = 1; step <= 200; ++step) {
    admitter.on_miss(ExpertIndex(0), step);
    if (step % 2 == 0) admitter.on_miss(ExpertIndex(1), step);
  }
  // No insertion for long: a place is expected to last as long as the averages look back, 33 steps.
  EXPECT_NEAR(admitter.stay_steps(), 1 / 0.03, 1e-6);
  admitter.set_costs({.miss_ns = 40'000, .upload_ns = 50'000, .link_busy = 1});
  EXPECT_NEAR(admitter.gain_min(), 50.0 / 40.0 * 0.03, 1e-9);
  EXPECT_TRUE(admitter.is_worth(ExpertIndex(0), ExpertIndex(1)));
  EXPECT_FALSE(admitter.is_worth(ExpertIndex(1), ExpertIndex(0)));
  admitter.set_costs({.miss_ns = 40'000, .upload_ns = 50'000'000, .link_busy = 1});
  EXPECT_FALSE(admitter.is_worth(ExpertIndex(0), ExpertIndex(1))) << "an upload of 1000 misses' time";
  admitter.set_costs({.miss_ns = 40'000, .upload_ns = 50'000'000, .link_busy = 0});
  EXPECT_TRUE(admitter.is_worth(ExpertIndex(0), ExpertIndex(1))) << "which nobody waits for";
}

TEST(ValueAdmitter, TheMoreIsInsertedTheLessAnUploadIsExpectedToLast) {
  ValueAdmitter admitter(kShape);
  for (Step step = 1; step <= 300; ++step) {
    admitter.on_miss(ExpertIndex(0), step);
    (void)admitter.admits(ExpertIndex(0), step);
    admitter.on_remove(ExpertIndex(0));
  }
  EXPECT_NEAR(admitter.stay_steps(), 2, 0.1) << "one insertion a step into two slots";
}

TEST(ValueAdmission, WhereMissesAreReadInPlaceNotAdmittedIsNoGain) {
  const auto policy = make("ewma:admit=value", kShape);
  policy->set_costs({.miss_ns = 1, .upload_ns = 1, .link_busy = 1});
  policy->on_insert(ExpertIndex(0), 1);
  for (Step step = 2; step <= 100; ++step) policy->on_access(ExpertIndex(0), step);
  policy->on_miss(ExpertIndex(1), 101);
  EXPECT_EQ(policy->gain(ExpertIndex(1), ExpertIndex(0)), 0);
  for (Step step = 102; step <= 300; ++step) policy->on_miss(ExpertIndex(1), step);
  EXPECT_GT(policy->gain(ExpertIndex(1), ExpertIndex(0)), 0.9);
}

TEST(ValueAdmission, WhereEveryMissIsLoadedARareNewcomerIsTheFirstToGoAgain) {
  const auto policy = make("lru:admit=value", {.n_experts = 64, .n_slots = 4});
  Replay replay(*policy, 4);
  for (int i = 0; i < 50; ++i) replay.step(experts({0, 1, 2, 3}));
  replay.step(experts({10}));  // LRU has to give one of the four
  for (std::uint32_t value = 11; value < 40; ++value) {
    replay.step(experts({value}));
    EXPECT_EQ(replay.victims(), experts({value - 1}));
  }
}

TEST(ValueAdmission, AGuestThatIsUsedOftenIsAdmitted) {
  const auto policy = make("lru:admit=value", {.n_experts = 64, .n_slots = 2});
  Replay replay(*policy, 2);
  for (int i = 0; i < 50; ++i) replay.step(experts({0, 1}));
  for (int i = 0; i < 100; ++i) replay.step(experts({5}));
  replay.step(experts({6}));
  EXPECT_TRUE(contains(replay.residents(), ExpertIndex(5)));
}

TEST(ValueAdmission, IntoFreePlacesEverybodyIsAdmitted) {
  const auto policy = make("lru:admit=value", {.n_experts = 8, .n_slots = 4});
  Replay replay(*policy, 4);
  for (std::uint32_t value : {0, 1, 2, 3}) replay.step(experts({value}));
  EXPECT_EQ(ranked(*policy, experts({0, 1, 2, 3}), 4), experts({0, 1, 2, 3})) << "LRU's order, no guest";
}

}  // namespace
}  // namespace moecached
