#include "daemon/ipc/ring_reader.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace moecached {
namespace {

class RingReaderTest : public ::testing::Test {
 protected:
  // What a client does: write records, then publish them together.
  moecached_shm_record& record(std::uint64_t position) {
    return lane_->ring[position % MOECACHED_RING_RECORDS];
  }
  void put(int kind, std::uint16_t layer, std::vector<std::uint16_t> ids, std::uint32_t seq = 0) {
    std::size_t taken = 0;
    std::uint64_t position = lane_->head;
    do {
      moecached_shm_record& r = record(position++);
      r = moecached_shm_record{};
      r.kind = static_cast<std::uint16_t>(kind);
      r.layer = layer;
      r.seq = seq;
      r.epoch = 7;
      while (taken < ids.size() && r.n_ids < MOECACHED_RECORD_IDS) r.ids[r.n_ids++] = ids[taken++];
      if (taken < ids.size()) r.flags |= MOECACHED_FLAG_MORE;
    } while (taken < ids.size());
    lane_->head = position;
  }
  std::vector<std::uint32_t> ids() const {
    std::vector<std::uint32_t> out;
    for (const ExpertIndex id : message_.ids) out.push_back(id.value);
    return out;
  }

  const std::vector<LayerLimits> limits_ = {{.n_experts = 32, .n_parts = 3}, {.n_experts = 64, .n_parts = 6}};
  std::unique_ptr<moecached_shm_lane> lane_ = std::make_unique<moecached_shm_lane>();
  RingReader reader_{*lane_, limits_};
  LaneMessage message_;
};

TEST_F(RingReaderTest, EmptyRingHasNoMessage) { EXPECT_EQ(reader_.next(&message_), RingOutcome::kEmpty); }

TEST_F(RingReaderTest, RouteKeepsOrderAndEpoch) {
  put(MOECACHED_RECORD_ROUTE, 1, {63, 0, 5});
  ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
  EXPECT_EQ(message_.kind, MOECACHED_RECORD_ROUTE);
  EXPECT_EQ(message_.layer, LayerIndex(1));
  EXPECT_EQ(message_.epoch, 7u);
  EXPECT_EQ(ids(), (std::vector<std::uint32_t>{63, 0, 5}));
  EXPECT_EQ(lane_->tail, 1u);
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kEmpty);
}

TEST_F(RingReaderTest, OnlyAStreamLiesInPlace) {
  for (const int kind : {MOECACHED_RECORD_STREAM, MOECACHED_RECORD_ROUTE}) {
    put(kind, 1, {2});
    record(lane_->head - 1).flags = MOECACHED_FLAG_IN_PLACE;
    ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
    EXPECT_EQ(message_.in_place, kind == MOECACHED_RECORD_STREAM);
    EXPECT_FALSE(message_.prefill);
  }
  put(MOECACHED_RECORD_STREAM, 1, {2});
  ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
  EXPECT_FALSE(message_.in_place);
}

TEST_F(RingReaderTest, LongListContinuesInTheNextRecords) {
  std::vector<std::uint16_t> all(64);
  for (std::uint16_t i = 0; i < 64; ++i) all[i] = i;
  put(MOECACHED_RECORD_LEASE, 1, all, 9);
  ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
  EXPECT_EQ(message_.ids.size(), 64u);
  EXPECT_EQ(message_.seq, 9u);
  EXPECT_EQ(reader_.records(), 4u);
}

TEST_F(RingReaderTest, WrapsAroundTheEndOfTheRing) {
  for (int i = 0; i < 3 * MOECACHED_RING_RECORDS; ++i) {
    put(MOECACHED_RECORD_ROUTE, 0, {static_cast<std::uint16_t>(i % 32)});
    ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
    ASSERT_EQ(ids(), (std::vector<std::uint32_t>{static_cast<std::uint32_t>(i % 32)}));
  }
}

TEST_F(RingReaderTest, RefusesIdOutOfRangeAndNamesTheSeq) {
  put(MOECACHED_RECORD_LEASE, 0, {31, 32}, 4);
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  EXPECT_EQ(message_.kind, MOECACHED_RECORD_LEASE);
  EXPECT_EQ(message_.seq, 4u);
}

TEST_F(RingReaderTest, RefusesAnIdNamedTwice) {
  put(MOECACHED_RECORD_ROUTE, 0, {3, 3});
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
}

TEST_F(RingReaderTest, RefusesUnknownKindLayerPartAndHalf) {
  put(4, 0, {1});
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  put(MOECACHED_RECORD_ROUTE, 2, {1});
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  put(MOECACHED_RECORD_STREAM, 0, {1});
  record(lane_->head - 1).part = 3;
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  put(MOECACHED_RECORD_STREAM, 0, {1});
  record(lane_->head - 1).half = 2;
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  EXPECT_LT(message_.half, 2u);
}

TEST_F(RingReaderTest, RefusesEmptyAndOverlongRecords) {
  put(MOECACHED_RECORD_ROUTE, 0, {});
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  put(MOECACHED_RECORD_ROUTE, 0, {1});
  record(lane_->head - 1).n_ids = MOECACHED_RECORD_IDS + 1;
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
}

TEST_F(RingReaderTest, RefusesAChainWithoutItsEndAndGoesOnBehindIt) {
  put(MOECACHED_RECORD_ROUTE, 0, {1});
  record(lane_->head - 1).flags = MOECACHED_FLAG_MORE;
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  put(MOECACHED_RECORD_ROUTE, 0, {2});
  ASSERT_EQ(reader_.next(&message_), RingOutcome::kMessage);
  EXPECT_EQ(ids(), (std::vector<std::uint32_t>{2}));
}

TEST_F(RingReaderTest, ImpossibleHeadIsRefusedOnceAndTheRingGoesOn) {
  lane_->head = MOECACHED_RING_RECORDS + 5;
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kRefused);
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kEmpty);
  put(MOECACHED_RECORD_ROUTE, 0, {2});
  EXPECT_EQ(reader_.next(&message_), RingOutcome::kMessage);
}

}  // namespace
}  // namespace moecached
