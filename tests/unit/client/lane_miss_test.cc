// Experts that are not resident: leases, and what happens when the daemon does not grant them.
#include <set>

#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

using Ids = std::vector<std::int32_t>;

class LaneMiss : public ClientTest {
 protected:
  void SetUp() override { open_all(); }
};

TEST_F(LaneMiss, LeasesTheWholeSetForTheEpochThatUsesIt) {
  daemon_->make_resident(1, {2});
  ASSERT_EQ(resolve(1, {2, 11}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(1, {2, 11}));
  const auto lease = daemon_->wait_for(MOECACHED_RECORD_LEASE, 1)[0];
  EXPECT_EQ(std::set<std::uint16_t>(lease.ids.begin(), lease.ids.end()), (std::set<std::uint16_t>{2, 11}));
  EXPECT_EQ(lease.layer, 1);
  EXPECT_EQ(lease.epoch, daemon_->lane_words(0).begun >> 16);
  const moecached_counters seen = counters();
  EXPECT_EQ(seen.lookups, 2u);
  EXPECT_EQ(seen.hits, 1u);
  EXPECT_EQ(seen.leases, 1u);
  EXPECT_EQ(seen.fallback_reads, 0u);
  for (const std::int32_t slot : slots_) EXPECT_LT(slot, 6) << "a slot of the daemon, not a private one";
}

TEST_F(LaneMiss, IsNotReportedASecondTimeAsRouting) {
  ASSERT_EQ(resolve(1, {2, 11}), MOECACHED_OK);
  ASSERT_EQ(resolve(1, {11}), MOECACHED_OK);
  moecached_lane_end(lane_);
  const auto routes = daemon_->wait_for(MOECACHED_RECORD_ROUTE, 1);
  ASSERT_EQ(routes.size(), 1u);
  EXPECT_EQ(routes[0].ids, std::vector<std::uint16_t>{11});
}

TEST_F(LaneMiss, MakesRoomForOneSetAfterAnother) {
  for (int round = 0; round < 20; ++round) {
    const Ids ids{round % 16, (round + 5) % 16, (round + 9) % 16, (round + 2) % 16};
    ASSERT_EQ(resolve(0, ids), MOECACHED_OK) << moecached_last_error();
    ASSERT_TRUE(slots_hold(0, ids)) << "round " << round;
  }
  EXPECT_GT(daemon_->evictions(), 10u);
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(LaneMiss, WaitsForRoomInAFullRingInsteadOfLosingTheRequest) {
  daemon_->make_resident(0, {1});
  daemon_->read_rings(false);
  for (int i = 0; i < MOECACHED_RING_RECORDS; ++i) ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  std::thread later([this] { daemon_->read_rings(true); });
  EXPECT_EQ(resolve(0, {7}), MOECACHED_OK) << moecached_last_error();
  later.join();
  EXPECT_TRUE(slots_hold(0, {7}));
  EXPECT_EQ(counters().leases, 1u);
}

// The status of a refused or failed lease, and what it must lead to.
class LaneMissWithoutGrant : public LaneMiss, public ::testing::WithParamInterface<OnRequest> {};

TEST_P(LaneMissWithoutGrant, IsServedFromTheFile) {
  daemon_->make_resident(2, {0});
  daemon_->on_lease(GetParam());
  ASSERT_EQ(resolve(2, {0, 13}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(2, {0, 13}));
  EXPECT_LT(slots_[0], 6);
  EXPECT_GE(slots_[1], 6) << "a private slot";
  EXPECT_LT(static_cast<std::uint32_t>(slots_[1]), layer(2).n_window_slots);
  const moecached_counters seen = counters();
  EXPECT_EQ(seen.hits, 1u);
  EXPECT_GE(seen.leases, 1u);
  EXPECT_EQ(seen.fallback_reads, 1u);
  EXPECT_EQ(seen.fallback_bytes, 1000u + 521u + 4132u);
  EXPECT_EQ(daemon_->lane_words(0).fallback_reads, 1u);
  EXPECT_EQ(daemon_->lane_words(0).fallback_bytes, 1000u + 521u + 4132u);
  // The lane works on, and the daemon serves again when it can.
  daemon_->on_lease(OnRequest::kServe);
  ASSERT_EQ(resolve(2, {12}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(2, {12}));
  EXPECT_LT(slots_[0], 6);
}

INSTANTIATE_TEST_SUITE_P(Answers, LaneMissWithoutGrant,
                         ::testing::Values(OnRequest::kIoError, OnRequest::kRefuse,
                                           OnRequest::kGrantNothing));

TEST_F(LaneMiss, IsLeftToStreamingWhenTheLayerHasGivenTheSlotsAway) {
  daemon_->make_resident(2, {0});
  daemon_->on_lease(OnRequest::kRefuseAsTraded);
  EXPECT_EQ(resolve(2, {0, 13}), MOECACHED_E_TOO_MANY);
  const moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16) << "a failed call must hold no epoch";
  EXPECT_EQ(counters().fallback_reads, 0u) << "the daemon streams; the file need not be read";
}

TEST_F(LaneMiss, IsLeftToStreamingWhenStalledLanesKeepTheSlots) {
  daemon_->make_resident(2, {0});
  daemon_->on_lease(OnRequest::kNoRoom);
  EXPECT_EQ(resolve(2, {0, 13}), MOECACHED_E_TOO_MANY);
  EXPECT_NE(std::string(moecached_last_error()).find("2 distinct experts"), std::string::npos)
      << moecached_last_error();
  const moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16) << "a failed call must hold no epoch";
  EXPECT_EQ(counters().leases, 1u);
  EXPECT_EQ(counters().fallback_reads, 0u);
  daemon_->on_lease(OnRequest::kServe);
  EXPECT_EQ(resolve(2, {0, 13}), MOECACHED_OK);
}

TEST_F(LaneMiss, AsksOnlyAFewTimesForWhatIsGrantedAndStillAbsent) {
  daemon_->on_lease(OnRequest::kGrantNothing);
  ASSERT_EQ(resolve(2, {13}), MOECACHED_OK);
  EXPECT_EQ(counters().leases, 3u);
}

TEST_F(LaneMiss, EndsWhenTheDaemonSaysThatTheModelChanged) {
  daemon_->on_lease(OnRequest::kModelChanged);
  EXPECT_EQ(resolve(2, {13}), MOECACHED_E_MODEL_CHANGED);
  EXPECT_NE(std::string(moecached_last_error()).find("model-0.bin"), std::string::npos)
      << moecached_last_error();
  const moecached_shm_lane words = daemon_->lane_words(0);
  EXPECT_EQ(words.completed, words.begun >> 16) << "a failed call must hold no epoch";
  const std::vector<SeenMessage> leases = daemon_->wait_for(MOECACHED_RECORD_LEASE, 1);
  ASSERT_EQ(leases.size(), 1u);
  EXPECT_GE(words.completed, leases[0].epoch) << "the next call must not use other experts in that epoch";
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(LaneMiss, DoesNotReadAFileThatChanged) {
  daemon_->on_lease(OnRequest::kIoError);
  ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  std::filesystem::resize_file(model_file_.paths()[0],
                               std::filesystem::file_size(model_file_.paths()[0]) + 1);
  EXPECT_EQ(resolve(0, {2}), MOECACHED_E_MODEL_CHANGED);
  // The other shard is untouched, and layers in it go on.
  EXPECT_EQ(resolve(1, {2}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(1, {2}));
}

TEST_F(LaneMiss, NoticesAChangedFileByItsTimeAlone) {
  daemon_->on_lease(OnRequest::kIoError);
  const auto& path = model_file_.paths()[0];
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(5));
  EXPECT_EQ(resolve(0, {2}), MOECACHED_E_MODEL_CHANGED);
}

TEST_F(LaneMiss, GoesOnWithTheOpenedFileWhenThePathLeadsElsewhere) {
  daemon_->on_lease(OnRequest::kIoError);
  std::filesystem::remove(model_file_.paths()[0]);
  ASSERT_EQ(resolve(0, {2}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(0, {2}));
}

// MOECACHED_WAIT_MS is read when a session is opened.
class SilentDaemon : public ClientTest {
 protected:
  void SetUp() override {
    ::setenv("MOECACHED_WAIT_MS", "50", 1);
    open_all();
    daemon_->on_lease(OnRequest::kSilence);
    daemon_->on_stream(OnRequest::kSilence);
  }
};

TEST_F(SilentDaemon, IsGivenUpAndTheFileServes) {
  ASSERT_EQ(resolve(1, {3, 4}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(1, {3, 4}));
  EXPECT_EQ(counters().fallback_reads, 2u);
  EXPECT_EQ(moecached_session_connected(session_), 1);
}

TEST_F(SilentDaemon, IsNotAskedAgainBeforeItHasAnswered) {
  for (int expert = 0; expert < 6; ++expert) ASSERT_EQ(resolve(1, {expert}), MOECACHED_OK);
  EXPECT_EQ(counters().leases, 1u);
  EXPECT_EQ(daemon_->wait_for(MOECACHED_RECORD_LEASE, 1).size(), 1u);
}

TEST_F(SilentDaemon, FullRingIsWaitedForOnlyOnce) {
  daemon_->make_resident(0, {1});
  daemon_->read_rings(false);
  for (int i = 0; i < MOECACHED_RING_RECORDS; ++i) ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  for (int expert = 2; expert < 8; ++expert) {
    ASSERT_EQ(resolve(0, {expert}), MOECACHED_OK) << moecached_last_error();
    EXPECT_TRUE(slots_hold(0, {expert}));
  }
  EXPECT_EQ(counters().leases, 0u);
  EXPECT_EQ(counters().fallback_reads, 6u);
}

TEST_F(SilentDaemon, NewLaneIsNotBoundByTheOldLanesUnansweredRequest) {
  ASSERT_EQ(resolve(1, {3}), MOECACHED_OK);
  moecached_lane_close(lane_);
  daemon_->on_lease(OnRequest::kServe);
  ASSERT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK);
  ASSERT_EQ(resolve(1, {3}), MOECACHED_OK);
  EXPECT_LT(slots_[0], 6);
  EXPECT_EQ(counters().leases, 2u);
}

TEST_F(SilentDaemon, StreamIsReadFromTheFile) {
  const Ids experts{1, 14};
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 1, experts.data(), 2, 0), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(lane_, 0, &data), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(model_file_.part_is(0, 1, 1, data));
  EXPECT_TRUE(model_file_.part_is(0, 1, 14, static_cast<const std::byte*>(data) + 521));
  EXPECT_EQ(counters().streamed_experts, 0u);
  EXPECT_EQ(counters().fallback_reads, 2u);
}

}  // namespace
}  // namespace moecached::client::test
