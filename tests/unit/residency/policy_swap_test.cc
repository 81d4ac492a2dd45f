// Changing the policy while it is at work: what is known about the experts outlives every policy.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "daemon/policy/registry.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;

void use(BrainHarness& b, std::uint32_t expert, int times) {
  for (int i = 0; i < times; ++i) (void)b.routed(0, {expert});
}

void swap_to(BrainHarness& b, const std::string& spec) {
  ASSERT_TRUE(b.brain.set_policy(ModelId(0), spec)) << spec;
}

// Expert 1 used often, some time ago; 2 twice, lately: what counts uses keeps 1, what sees the last use alone
// keeps 2.
void often_and_lately(BrainHarness& b) {
  b.make_resident(0, {1});
  b.make_resident(0, {2});
  use(b, 1, 60);
  use(b, 2, 2);
}

TEST(PolicySwap, ThereAndBackKeepsWhatTheFirstPolicyKnew) {
  for (const char* between : {"lru", "fifo", "arc", "s3fifo", "wtinylfu", "slru:admit=second-miss"}) {
    BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, "ewma");
    often_and_lately(b);
    swap_to(b, between);
    swap_to(b, "ewma");
    EXPECT_EQ(b.lease(0, {5}), (Texts{"unpublish 0/0 expert 2 slot 1"})) << between;
  }
}

TEST(PolicySwap, GivesEveryPolicyThatCountsTheUsesBeforeIt) {
  for (const char* spec : {"ewma", "lfu", "lfu:halve=64", "static"}) {
    BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, "lru");
    often_and_lately(b);
    swap_to(b, spec);
    EXPECT_EQ(b.lease(0, {5}), (Texts{"unpublish 0/0 expert 2 slot 1"})) << spec;
  }
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, "ewma");
  often_and_lately(b);
  swap_to(b, "lru");
  EXPECT_EQ(b.lease(0, {5}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(PolicySwap, KeepsWhatIsKnownOfAbsentExperts) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, "lru");
  b.make_resident(0, {1});
  use(b, 5, 40);  // missed, never loaded
  swap_to(b, "ewma");
  EXPECT_GT(b.gain(5), 0.5);
  EXPECT_LT(b.gain(6), 0);
}

TEST(PolicySwap, KeepsTheCosts) {
  BrainHarness b({.n_experts = 8, .n_slots = 1}, 1, "ewma:admit=value");
  b.make_resident(0, {1});
  use(b, 5, 40);
  b.brain.set_costs(ModelId(0), LayerIndex(0), {.miss_ns = 1, .upload_ns = 1000, .link_busy = 1});
  EXPECT_EQ(b.gain(5), 0) << "not worth a thousand misses";
  swap_to(b, "lru:admit=value");
  EXPECT_EQ(b.gain(5), 0);
  b.brain.set_costs(ModelId(0), LayerIndex(0), {.miss_ns = 1, .upload_ns = 1, .link_busy = 1});
  EXPECT_GT(b.gain(5), 0);
}

// The books are checked after every event. No event is lost: each lease is answered, once.
TEST(PolicySwap, TenThousandLoseNoResidentAndNoDecision) {
  constexpr std::uint32_t kExperts = 24, kSlots = 6;
  BrainHarness b({.n_experts = kExperts, .n_slots = kSlots}, 2, "lru");
  std::vector<std::string> specs;
  for (std::string_view name : policy_names()) {
    for (const char* admit : {"always", "second-miss", "value"})
      specs.push_back(std::string(name) + ":admit=" + admit);
  }
  std::mt19937 random(41);
  std::set<std::uint32_t> resident;
  std::vector<Command> in_flight;
  std::uint64_t epoch = 0, grants = 0, lookups = 0, evictions = 0;
  const auto take = [&] {
    const auto taken = b.brain.take_commands();
    for (const Command& command : taken) {
      if (command.kind == CommandKind::kUnpublish) {
        ASSERT_EQ(resident.erase(command.expert.value), 1u);
        ++evictions;
      }
      if (command.kind == CommandKind::kPublish) {
        ASSERT_TRUE(resident.insert(command.expert.value).second);
      }
      if (command.kind == CommandKind::kGrant) {
        ++grants;
      } else if (command.kind != CommandKind::kPublish) {
        in_flight.push_back(command);
      }
    }
    b.brain.check_invariants();
  };
  const auto swap = [&](int i) {
    const std::uint32_t before = b.resident();
    swap_to(b, specs[(static_cast<std::size_t>(i) * 7 + random() % 3) % specs.size()]);
    ASSERT_EQ(b.resident(), before);
    ASSERT_TRUE(b.brain.take_commands().empty()) << "a swap by itself moves nothing";
  };
  int swaps = 0;
  for (int i = 0; swaps < 10'000; ++i) {
    std::set<std::uint32_t> set;
    while (set.size() < 3)
      set.insert(static_cast<std::uint32_t>(std::min(random() % kExperts, random() % kExperts)));
    std::vector<ExpertIndex> wanted;
    for (std::uint32_t value : set) wanted.emplace_back(value);
    ++epoch;
    b.brain.lease(LaneId(0), LayerIndex(0), wanted, static_cast<std::uint32_t>(epoch), epoch);
    lookups += 3;
    take();
    while (!in_flight.empty()) {
      swap(swaps++);  // in the middle of evictions and reads
      const Command command = in_flight.back();
      in_flight.pop_back();
      if (command.kind == CommandKind::kUnpublish) {
        b.brain.grace_done(command.model, command.layer, command.slot);
      } else {
        b.brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
      }
      take();
      if (HasFatalFailure()) return;
    }
    swap(swaps++);
    ASSERT_EQ(grants, epoch);
    for (std::uint32_t value : set) ASSERT_TRUE(resident.contains(value));
    ASSERT_EQ(resident.size(), b.resident());
    b.brain.epoch_completed(LaneId(0), epoch);
    take();
  }
  EXPECT_EQ(b.counters().lookups, lookups);
  EXPECT_EQ(b.counters().evictions, evictions);
  EXPECT_EQ(b.counters().leases, epoch);
  EXPECT_GT(evictions, 1000u);
}

}  // namespace
}  // namespace moecached
