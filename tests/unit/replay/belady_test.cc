#include "bench/replay/belady.h"

#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "tests/unit/replay/traces.h"

namespace moecached::replay {
namespace {

using Set = std::uint32_t;  // bits of experts

// The fewest misses of any choice, found by trying all of them. One layer.
class BruteForce {
 public:
  BruteForce(const Trace& trace, std::uint32_t n_slots, bool bypass)
      : trace_(trace), n_slots_(static_cast<int>(n_slots)), bypass_(bypass) {}

  std::uint64_t misses(std::size_t row = 0, Set resident = 0) {
    if (row == trace_.size()) return 0;
    const auto known = best_.find({row, resident});
    if (known != best_.end()) return known->second;
    Set event = 0;
    for (const std::uint16_t id : trace_.event(row, 0)) event |= 1u << id;
    const auto missed = static_cast<std::uint64_t>(std::popcount(event & ~resident));
    std::uint64_t best = UINT64_MAX;
    const Set all = resident | event;
    for (Set keep = all;; keep = (keep - 1) & all) {
      if (std::popcount(keep) <= n_slots_ && allowed(keep, resident, event))
        best = std::min(best, misses(row + 1, keep));
      if (keep == 0) break;
    }
    return best_[{row, resident}] = missed + best;
  }

 private:
  bool allowed(Set keep, Set resident, Set event) const {
    if (bypass_) return true;
    // All of the event are loaded, and no more goes than has to.
    if (std::popcount(event) > n_slots_) return keep == resident;
    return (event & ~keep) == 0 && std::popcount(keep) == std::min(n_slots_, std::popcount(resident | event));
  }
  const Trace& trace_;
  const int n_slots_;
  const bool bypass_;
  std::map<std::pair<std::size_t, Set>, std::uint64_t> best_;
};

TEST(Belady, NoChoiceDoesBetter) {
  std::uint64_t mandatory_misses = 0, bypass_misses = 0;
  for (std::uint32_t seed = 1; seed <= 400; ++seed) {
    const std::uint32_t k = 1 + seed % 3;
    const std::uint32_t n_slots = 1 + seed % 4;
    const Trace trace = make_trace({.n_layers = 1, .n_experts = 6, .k = k, .n_rows = 9, .seed = seed});
    const auto order = interleave(trace, 1);
    ASSERT_TRUE(order);
    for (const bool bypass : {false, true}) {
      const Tally tally = replay_belady(trace, *order, {.bypass = bypass, .n_slots = {n_slots}}).total();
      ASSERT_EQ(tally.misses(), BruteForce(trace, n_slots, bypass).misses())
          << "seed " << seed << ", k " << k << ", slots " << n_slots << (bypass ? ", bypass" : "");
      (bypass ? bypass_misses : mandatory_misses) += tally.misses();
    }
  }
  EXPECT_LT(bypass_misses, mandatory_misses);  // the traces tell the two apart
}

Trace single(const std::vector<std::uint16_t>& ids) {
  TraceHeader header;
  header.n_layers = 1;
  header.n_experts = 8;
  header.k = header.n_used = 1;
  Trace trace(std::move(header));
  for (const std::uint16_t id : ids) EXPECT_TRUE(trace.add({}, {&id, 1}));
  return trace;
}

TEST(Belady, ByHand) {
  const Trace trace = single({1, 2, 3, 1, 2, 4, 1, 2});
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  // Two slots, all loaded: 1 and 2 in, 3 for 2 (used later than 1), 1 hits, 2 for 3, 4 for 2 or 1, one of
  // them hits.
  Tally tally = replay_belady(trace, *order, {.bypass = false, .n_slots = {2}}).total();
  EXPECT_EQ(tally.hits, 2u);
  EXPECT_EQ(tally.insertions, 6u);
  // 3 and 4 are left where they are: 1 and 2 stay.
  tally = replay_belady(trace, *order, {.bypass = true, .n_slots = {2}}).total();
  EXPECT_EQ(tally.hits, 4u);
  EXPECT_EQ(tally.insertions, 2u);
}

TEST(Belady, WhatIsNeverUsedAgainIsNotUploaded) {
  const Trace trace = single({1, 2, 3, 4});
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  EXPECT_EQ(replay_belady(trace, *order, {.bypass = true, .n_slots = {2}}).total().insertions, 0u);
  EXPECT_EQ(replay_belady(trace, *order, {.bypass = false, .n_slots = {2}}).total().insertions, 4u);
}

TEST(Belady, PrivatePoolsAreThoseOfTheirLanesAlone) {
  const Trace trace = make_trace({.n_layers = 2, .n_rows = 300, .n_sequences = 2});
  const auto order = interleave(trace, 2);
  ASSERT_TRUE(order);
  const Tally both =
      replay_belady(trace, *order, {.bypass = false, .n_slots = {3, 3}, .n_lanes = 2, .private_pools = true})
          .total();
  std::uint64_t hits = 0;
  for (const std::uint32_t lane : {0u, 1u}) {
    std::vector<Turn> own;
    for (const Turn& turn : *order) {
      if (turn.lane == lane) own.push_back(turn);
    }
    hits += replay_belady(trace, own, {.bypass = false, .n_slots = {3, 3}}).total().hits;
  }
  EXPECT_EQ(both.hits, hits);
}

}  // namespace
}  // namespace moecached::replay
