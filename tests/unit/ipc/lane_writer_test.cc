#include "daemon/ipc/lane_writer.h"

#include <gmock/gmock.h>

#include <numeric>
#include <thread>
#include <vector>

#include "daemon/ipc/ring_reader.h"
#include "daemon/platform/futex.h"

namespace moecached {
namespace {

using testing::ElementsAre;

class LaneWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    auto session =
        Session::create({.id = SessionId(3), .boot_epoch = 1, .peer = {}, .label = "t", .pidfd = {}});
    ASSERT_TRUE(session) << session.error().text;
    session_ = *std::move(session);
    writer_ = std::make_unique<LaneWriter>(*session_, 5);
    reader_ = std::make_unique<RingReader>(words(), limits_);
  }
  moecached_shm_lane& words() { return session_->lane(0); }
  // As the core loop answers a lease.
  void answer(std::uint32_t seq, moecached_grant_status status) {
    words().lease_status = status;
    std::atomic_ref(words().lease_done).store(seq, std::memory_order_release);
    futex_wake(&words().lease_done);
  }
  static bool never() { return false; }

  const std::vector<LayerLimits> limits_{4, {.n_experts = 256, .n_parts = 3}};
  std::shared_ptr<Session> session_;
  std::unique_ptr<LaneWriter> writer_;
  std::unique_ptr<RingReader> reader_;
};

TEST_F(LaneWriterTest, AnEpochIsBegunBeforeItIsCompletedAndNamesItsLayer) {
  EXPECT_EQ(words().state, 1u);
  EXPECT_EQ(words().model_id, 5u);
  writer_->begin(2);
  EXPECT_EQ(words().begun, 1u << 16 | 2u);
  EXPECT_EQ(words().completed, 0u);
  writer_->begin(3);
  EXPECT_EQ(words().begun, 2u << 16 | 3u);
  EXPECT_EQ(words().completed, 1u);
  writer_->close();
  EXPECT_EQ(words().completed, 2u);
  EXPECT_EQ(words().state, 0u);
}

TEST_F(LaneWriterTest, TheCoreLoopReadsTheRecordsAsTheyWereMeant) {
  std::vector<std::uint16_t> many(45);
  std::iota(many.begin(), many.end(), std::uint16_t{100});
  writer_->begin(1);
  writer_->post_route({.layer = 1, .n_tokens = 9, .prefill = true}, many);
  writer_->begin(3);
  writer_->post_route({.layer = 3}, std::vector<std::uint16_t>{7});
  LaneMessage message;
  ASSERT_EQ(reader_->next(&message), RingOutcome::kMessage);
  EXPECT_EQ(message.kind, MOECACHED_RECORD_ROUTE);
  EXPECT_EQ(message.layer, LayerIndex(1));
  EXPECT_EQ(message.epoch, 1u);
  EXPECT_EQ(message.n_tokens, 9u);
  EXPECT_TRUE(message.prefill);
  ASSERT_EQ(message.ids.size(), 45u);
  EXPECT_EQ(message.ids.back(), ExpertIndex(144));
  ASSERT_EQ(reader_->next(&message), RingOutcome::kMessage);
  EXPECT_EQ(message.epoch, 2u);
  EXPECT_FALSE(message.prefill);
  EXPECT_THAT(message.ids, ElementsAre(ExpertIndex(7)));
  EXPECT_EQ(reader_->next(&message), RingOutcome::kEmpty);
}

TEST_F(LaneWriterTest, ALeaseWaitsForItsOwnAnswer) {
  std::thread core([this] {
    LaneMessage message;
    for (std::uint32_t seq = 1; seq <= 2; ++seq) {
      while (reader_->next(&message) != RingOutcome::kMessage) std::this_thread::yield();
      EXPECT_EQ(message.kind, MOECACHED_RECORD_LEASE);
      EXPECT_EQ(message.seq, seq);
      EXPECT_EQ(message.epoch, 1u) << "the one that is begun next";
      answer(seq, seq == 1 ? MOECACHED_GRANT_NO_ROOM : MOECACHED_GRANT_OK);
    }
  });
  const std::vector<std::uint16_t> ids = {1, 2};
  EXPECT_EQ(writer_->lease({.layer = 0}, ids, never), MOECACHED_GRANT_NO_ROOM);
  EXPECT_EQ(writer_->lease({.layer = 0}, ids, never), MOECACHED_GRANT_OK);
  core.join();
}

TEST_F(LaneWriterTest, ALeaseOfAClientThatHasGoneIsNotWaitedFor) {
  EXPECT_EQ(writer_->lease({.layer = 0}, std::vector<std::uint16_t>{1}, [] { return true; }), std::nullopt);
}

TEST_F(LaneWriterTest, AFullRingDropsRoutesAndCountsThem) {
  const std::vector<std::uint16_t> ids = {1};
  writer_->begin(0);
  for (int i = 0; i < MOECACHED_RING_RECORDS + 5; ++i) writer_->post_route({.layer = 0}, ids);
  EXPECT_EQ(words().dropped, 5u);
  EXPECT_EQ(words().head, std::uint64_t{MOECACHED_RING_RECORDS});
  EXPECT_EQ(writer_->lease({.layer = 0}, ids, [] { return true; }), std::nullopt)
      << "nor does a lease run over";
  EXPECT_EQ(words().head, std::uint64_t{MOECACHED_RING_RECORDS});
}

}  // namespace
}  // namespace moecached
