#include "daemon/policy/fifo.h"

#include <gtest/gtest.h>

#include "tests/unit/policy/ranking.h"

namespace moecached {
namespace {

using testing_policies::experts;
using testing_policies::ranked;
using testing_policies::Replay;

TEST(FifoPolicy, EvictsInTheOrderOfInsertionWhateverIsUsed) {
  FifoPolicy policy({.n_experts = 8, .n_slots = 3});
  policy.on_insert(ExpertIndex(5), 1);
  policy.on_insert(ExpertIndex(1), 2);
  policy.on_insert(ExpertIndex(3), 3);
  for (Step step = 4; step < 10; ++step) policy.on_access(ExpertIndex(5), step);
  EXPECT_EQ(ranked(policy, experts({1, 3, 5}), 3), experts({5, 1, 3}));
}

TEST(FifoPolicy, OrdersTheExpertsOfOneStepByIndex) {
  FifoPolicy policy({.n_experts = 8, .n_slots = 4});
  for (std::uint32_t value : {6, 0, 4}) policy.on_insert(ExpertIndex(value), 1);
  EXPECT_EQ(ranked(policy, experts({4, 6, 0}), 3), experts({0, 4, 6}));
}

TEST(FifoPolicy, AnExpertThatComesBackIsTheNewest) {
  FifoPolicy policy({.n_experts = 8, .n_slots = 2});
  Replay replay(policy, 2);
  replay.step(experts({1}));
  replay.step(experts({2}));
  replay.step(experts({3}));
  EXPECT_EQ(replay.victims(), experts({1}));
  replay.step(experts({1}));
  EXPECT_EQ(replay.victims(), experts({2}));
  replay.step(experts({4}));
  EXPECT_EQ(replay.victims(), experts({3}));
}

TEST(FifoPolicyDeathTest, AbortsOnExpertsThatAreNotResident) {
  FifoPolicy policy({.n_experts = 4, .n_slots = 2});
  policy.on_insert(ExpertIndex(1), 1);
  EXPECT_DEATH(policy.on_insert(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_access(ExpertIndex(0), 2), "CHECK failed");
  EXPECT_DEATH(policy.on_remove(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
