// Resolving experts that are resident, and arguments that cannot be resolved.
#include <algorithm>
#include <set>

#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

using Ids = std::vector<std::int32_t>;

std::set<std::uint16_t> as_set(const std::vector<std::uint16_t>& ids) { return {ids.begin(), ids.end()}; }

class LaneResolve : public ClientTest {
 protected:
  void SetUp() override { open_all(); }
};

TEST_F(LaneResolve, ReturnsSlotsThatHoldTheExpertsBytes) {
  daemon_->make_resident(1, {3, 9, 15, 0});
  const Ids ids{9, 0, 15, 3};
  ASSERT_EQ(resolve(1, ids), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(1, ids));
}

TEST_F(LaneResolve, CheckOfTheBytesNoticesOneFlippedBit) {
  daemon_->make_resident(1, {3});
  ASSERT_EQ(resolve(1, {3}), MOECACHED_OK);
  ASSERT_TRUE(slots_hold(1, {3}));
  daemon_->flip_byte(1, slots_[0], model_file_.slot_offset(2) + 4131);
  EXPECT_FALSE(slots_hold(1, {3}));
}

TEST_F(LaneResolve, CountsResidentPairsAsHitsAndSendsNoRequest) {
  daemon_->make_resident(0, {1, 2, 3, 4});
  ASSERT_EQ(resolve(0, {1, 2, 3, 4}), MOECACHED_OK);
  ASSERT_EQ(resolve(0, {4, 3}), MOECACHED_OK);
  const moecached_counters seen = counters();
  EXPECT_EQ(seen.lookups, 6u);
  EXPECT_EQ(seen.hits, 6u);
  EXPECT_EQ(seen.leases, 0u);
  EXPECT_EQ(seen.fallback_reads, 0u);
  EXPECT_EQ(daemon_->lane_words(0).lookups, 6u);
  EXPECT_EQ(daemon_->count(MOECACHED_RECORD_LEASE), 0u);
}

TEST_F(LaneResolve, TellsTheDaemonWhichExpertsWereUsedInWhichEpoch) {
  daemon_->make_resident(2, {5, 6, 7});
  ASSERT_EQ(resolve(2, {7, 5}), MOECACHED_OK);
  const std::uint64_t begun = daemon_->lane_words(0).begun;
  moecached_lane_end(lane_);
  const auto routes = daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1);
  EXPECT_EQ(routes[0].layer, 2);
  EXPECT_EQ(as_set(routes[0].ids), (std::set<std::uint16_t>{5, 7}));
  EXPECT_EQ(routes[0].flags, 0);
  EXPECT_EQ(begun & 0xffff, 2u);
  EXPECT_EQ(routes[0].epoch, begun >> 16);
}

TEST_F(LaneResolve, HoldsAnEpochFromResolveToEnd) {
  daemon_->make_resident(1, {1});
  ASSERT_EQ(resolve(1, {1}), MOECACHED_OK);
  moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_LT(words.completed, words.begun >> 16);
  moecached_lane_end(lane_);
  words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16);
}

TEST_F(LaneResolve, NextResolveEndsTheEpochBefore) {
  daemon_->make_resident(1, {1});
  daemon_->make_resident(2, {1});
  ASSERT_EQ(resolve(1, {1}), MOECACHED_OK);
  const std::uint64_t first = daemon_->lane_words(0).begun >> 16;
  ASSERT_EQ(resolve(2, {1}), MOECACHED_OK);
  EXPECT_GE(daemon_->lane_words(0).completed, first);
}

TEST_F(LaneResolve, SendsEachExpertOfSeveralRowsOnce) {
  daemon_->make_resident(0, {0, 1, 2, 3});
  // Rows of two ids in a matrix three wide: the stride is larger than the row.
  const Ids matrix{0, 1, -7, 1, 2, -7, 3, 0, -7};
  Ids slots(6);
  ASSERT_EQ(moecached_lane_resolve(lane_, 0, matrix.data(), 3, 2, 3 * sizeof(std::int32_t), slots.data()),
            MOECACHED_OK)
      << moecached_last_error();
  const Ids flat{0, 1, 1, 2, 3, 0};
  slots_ = slots;
  EXPECT_TRUE(slots_hold(0, flat));
  EXPECT_EQ(counters().lookups, 6u);
  moecached_lane_end(lane_);
  const auto routes = daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1);
  EXPECT_EQ(routes[0].ids.size(), 4u);
  EXPECT_EQ(as_set(routes[0].ids), (std::set<std::uint16_t>{0, 1, 2, 3}));
}

TEST_F(LaneResolve, MarksLargeBatchesAsPrompts) {
  daemon_->make_resident(0, {4, 5});
  Ids matrix;
  for (int row = 0; row < 64; ++row) matrix.push_back(4 + row % 2);
  Ids slots(matrix.size());
  ASSERT_EQ(
      moecached_lane_resolve(lane_, 0, matrix.data(), matrix.size(), 1, sizeof(std::int32_t), slots.data()),
      MOECACHED_OK);
  moecached_lane_end(lane_);
  EXPECT_EQ(daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1)[0].flags, MOECACHED_FLAG_PREFILL);
}

TEST_F(LaneResolve, RefusesMoreDistinctExpertsThanSlotsWithoutAsking) {
  EXPECT_EQ(resolve(0, {0, 1, 2, 3, 4, 5, 6}), MOECACHED_E_TOO_MANY);
  EXPECT_NE(std::string(moecached_last_error()).find("7 distinct experts"), std::string::npos)
      << moecached_last_error();
  // Repeats do not count.
  daemon_->make_resident(0, {0, 1, 2, 3, 4, 5});
  EXPECT_EQ(resolve(0, {0, 1, 2, 3, 4, 5, 5, 4, 3}), MOECACHED_OK);
  EXPECT_EQ(daemon_->count(MOECACHED_RECORD_LEASE), 0u);
  EXPECT_EQ(counters().lookups, 9u);
}

TEST_F(LaneResolve, KnowsHowManySlotsAreOpenNow) {
  daemon_->make_resident(0, {0, 1, 2, 3});
  daemon_->set_open_slots(0, 3);
  EXPECT_EQ(resolve(0, {0, 1, 2, 3}), MOECACHED_E_TOO_MANY);
  EXPECT_EQ(resolve(0, {0, 1, 3}), MOECACHED_OK) << "whatever the ids of their slots";
  daemon_->set_open_slots(0, 4);
  EXPECT_EQ(resolve(0, {0, 1, 2, 3}), MOECACHED_OK);
  EXPECT_EQ(daemon_->count(MOECACHED_RECORD_LEASE), 0u);
}

TEST_F(LaneResolve, TooManyStillEndsTheEpochBefore) {
  daemon_->make_resident(0, {0});
  ASSERT_EQ(resolve(0, {0}), MOECACHED_OK);
  ASSERT_EQ(resolve(0, {0, 1, 2, 3, 4, 5, 6}), MOECACHED_E_TOO_MANY);
  const moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16);
}

TEST_F(LaneResolve, RefusesIdsAndLayersThatDoNotExist) {
  EXPECT_EQ(resolve(0, {16}), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(resolve(0, {-1}), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(resolve(3, {1}), MOECACHED_E_ARGUMENT);
  std::int32_t slot = 0;
  const std::int32_t id = 1;
  EXPECT_EQ(moecached_lane_resolve(lane_, 0, &id, 1, 1, 3, &slot), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(counters().lookups, 0u);
}

TEST_F(LaneResolve, AcceptsAnEmptyList) { EXPECT_EQ(resolve(0, {}), MOECACHED_OK); }

TEST_F(LaneResolve, CountsRoutingRecordsLostToAFullRing) {
  daemon_->make_resident(0, {1, 2});
  daemon_->read_rings(false);
  for (int i = 0; i < MOECACHED_RING_RECORDS; ++i) ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  EXPECT_EQ(counters().dropped_records, 0u);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(resolve(0, {2}), MOECACHED_OK);
  EXPECT_EQ(counters().dropped_records, 3u);
  EXPECT_EQ(daemon_->lane_words(0).dropped, 3u);
  EXPECT_TRUE(slots_hold(0, {2}));
  // What got in is read in order, and the ring takes records again.
  daemon_->read_rings(true);
  EXPECT_EQ(daemon_->wait_for(MOECACHED_RECORD_ROUTE, MOECACHED_RING_RECORDS).size(),
            std::size_t{MOECACHED_RING_RECORDS});
  ASSERT_EQ(resolve(0, {2}), MOECACHED_OK);
  moecached_lane_end(lane_);
  EXPECT_EQ(daemon_->wait_for(MOECACHED_RECORD_ROUTE, MOECACHED_RING_RECORDS + 1).back().ids,
            std::vector<std::uint16_t>{2});
}

TEST_F(LaneResolve, TreatsTableEntriesThatAreNoSlotsAsAbsent) {
  for (const std::int32_t lie : {6, 1 << 30, -2, INT32_MIN}) {
    daemon_->on_lease(OnRequest::kIoError);
    daemon_->set_entry(0, 8, lie);
    ASSERT_EQ(resolve(0, {8}), MOECACHED_OK) << moecached_last_error();
    EXPECT_TRUE(slots_hold(0, {8})) << "entry " << lie;
  }
}

TEST_F(LaneResolve, ResidentOnlyWaitsForNothing) {
  daemon_->make_resident(1, {2, 4});
  const Ids wanted{1, 2, 3, 4};
  Ids slots(4, -99);
  ASSERT_EQ(moecached_lane_resolve_resident(lane_, 1, wanted.data(), 4, slots.data()), MOECACHED_OK)
      << moecached_last_error();
  EXPECT_EQ(slots[0], -1);
  EXPECT_EQ(slots[2], -1);
  EXPECT_TRUE(model_file_.slot_holds(layer(1), 1, slots[1], 2));
  EXPECT_TRUE(model_file_.slot_holds(layer(1), 1, slots[3], 4));
  const moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_LT(words.completed, words.begun >> 16) << "the slots must be protected until end";
  moecached_lane_end(lane_);
  EXPECT_EQ(as_set(daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1)[0].ids), (std::set<std::uint16_t>{2, 4}));
  EXPECT_EQ(daemon_->count(MOECACHED_RECORD_LEASE), 0u);
}

// No record names an epoch that uses nothing, and what follows it, the streaming, may take long.
TEST_F(LaneResolve, ResidentOnlyHoldsNoEpochWhenNothingIs) {
  const Ids wanted{3, 5};
  Ids slots(2);
  ASSERT_EQ(moecached_lane_resolve_resident(lane_, 1, wanted.data(), 2, slots.data()), MOECACHED_OK);
  EXPECT_EQ(slots, (Ids{-1, -1}));
  moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16);
  daemon_->make_resident(1, {5});
  ASSERT_EQ(moecached_lane_resolve_resident(lane_, 1, wanted.data(), 2, slots.data()), MOECACHED_OK);
  words = daemon_->lane_words(0);
  EXPECT_LT(words.completed, words.begun >> 16) << "it uses expert 5";
}

TEST_F(LaneResolve, ResidentOnlyRefusesRepeats) {
  const Ids twice{1, 1};
  Ids slots(2);
  EXPECT_EQ(moecached_lane_resolve_resident(lane_, 1, twice.data(), 2, slots.data()), MOECACHED_E_ARGUMENT);
}

class LongLists : public ClientTest {
 protected:
  LongLists()
      : ClientTest({.n_layers = 1,
                    .n_experts = 300,
                    .n_slots = 250,
                    .n_expert_used = 8,
                    .n_files = 1,
                    .part_bytes = {64}}) {}
  void SetUp() override { open_all(); }
};

TEST_F(LongLists, ContinueInFurtherRecords) {
  Ids ids;
  for (int i = 0; i < 250; ++i) ids.push_back(299 - i);
  ASSERT_EQ(resolve(0, ids), MOECACHED_OK) << moecached_last_error();  // all absent: one lease of 13 records
  EXPECT_TRUE(slots_hold(0, ids));
  const auto lease = daemon_->wait_for(MOECACHED_RECORD_LEASE, 1)[0];
  EXPECT_EQ(lease.n_records, 13u);
  EXPECT_EQ(lease.ids.size(), 250u);
  ASSERT_EQ(resolve(0, ids), MOECACHED_OK);
  moecached_lane_end(lane_);
  const auto route = daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1)[0];
  EXPECT_EQ(route.n_records, 13u);
  EXPECT_EQ(as_set(route.ids).size(), 250u);
  EXPECT_EQ(counters().hits, 250u);
}

TEST_F(LongLists, AreDroppedWholeWhenTheRingLacksRoomForAll) {
  Ids ids;
  for (int i = 0; i < 250; ++i) ids.push_back(i);
  daemon_->make_resident(0, ids);
  daemon_->read_rings(false);
  for (int i = 0; i < 2048 / 13; ++i) ASSERT_EQ(resolve(0, ids), MOECACHED_OK);  // leaves room for 7
  ASSERT_EQ(resolve(0, ids), MOECACHED_OK);
  EXPECT_EQ(counters().dropped_records, 13u);
  ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  EXPECT_EQ(counters().dropped_records, 13u);
}

}  // namespace
}  // namespace moecached::client::test
