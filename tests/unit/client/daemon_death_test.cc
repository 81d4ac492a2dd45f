// The daemon goes away: the same bytes from the file, and a new daemon taken up when there is one.
#include <thread>

#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

using Ids = std::vector<std::int32_t>;

class DaemonDeath : public ClientTest {
 protected:
  void SetUp() override { open_all(); }

  [[nodiscard]] moecached_status resolve_on(moecached_lane* lane, std::uint32_t layer, const Ids& ids) {
    slots_.assign(ids.size(), -99);
    return moecached_lane_resolve(lane, layer, ids.data(), 1, ids.size(), ids.size() * sizeof(std::int32_t),
                                  slots_.data());
  }
};

TEST_F(DaemonDeath, DuringAWaitEndsInTheFilesBytes) {
  daemon_->make_resident(1, {2});
  daemon_->on_lease(OnRequest::kHangUp);
  ASSERT_EQ(resolve(1, {2, 5, 6}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(1, {2, 5, 6}));
  EXPECT_EQ(counters().fallback_reads, 2u);
  EXPECT_EQ(moecached_session_connected(session_), 0);
}

TEST_F(DaemonDeath, LeavesResidentExpertsInUse) {
  daemon_->make_resident(0, {1, 2, 3});
  daemon_->hang_up();
  ASSERT_EQ(resolve(0, {3, 1}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(0, {3, 1}));
  EXPECT_EQ(counters().hits, 2u);
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(DaemonDeath, PrivateSlotsAreACache) {
  daemon_->hang_up();
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(resolve(0, {4, 5}), MOECACHED_OK) << moecached_last_error();
    ASSERT_TRUE(slots_hold(0, {4, 5}));
  }
  EXPECT_EQ(counters().fallback_reads, 2u);
  EXPECT_EQ(counters().lookups, 6u);
  EXPECT_EQ(counters().hits, 4u);
  EXPECT_EQ(counters().leases, 0u);
}

TEST_F(DaemonDeath, ServesEveryExpertOfEveryLayerRight) {
  daemon_->make_resident(0, {0, 1, 2, 3, 4, 5});
  daemon_->hang_up();
  for (std::uint32_t l = 0; l < 3; ++l) {
    for (std::int32_t first = 0; first < 16; ++first) {
      Ids ids;
      for (int i = 0; i < 6; ++i) ids.push_back((first + i * 3) % 16);  // as many as the layer promised
      ASSERT_EQ(resolve(l, ids), MOECACHED_OK) << moecached_last_error();
      ASSERT_TRUE(slots_hold(l, ids)) << "layer " << l << " first " << first;
    }
  }
}

TEST_F(DaemonDeath, FallbackNeverOverwritesSlotsThatAnotherLaneUses) {
  moecached_lane* other = nullptr;
  ASSERT_EQ(moecached_lane_open(model_, &other), MOECACHED_OK);
  daemon_->hang_up();
  const Ids held{0, 1, 2, 3};
  ASSERT_EQ(resolve_on(other, 0, held), MOECACHED_OK) << moecached_last_error();
  const Ids held_slots = slots_;
  for (std::int32_t first = 4; first < 12; ++first) {
    ASSERT_EQ(resolve(0, {first, first + 1, first + 2, first + 3}), MOECACHED_OK) << moecached_last_error();
    ASSERT_TRUE(slots_hold(0, {first, first + 1, first + 2, first + 3}));
    slots_ = held_slots;
    ASSERT_TRUE(slots_hold(0, held));
  }
  // All that the layer promises, 6 experts, while the other lane holds 4 of the usual 8 private slots.
  ASSERT_EQ(resolve(0, {5, 6, 7, 8, 9, 10}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(0, {5, 6, 7, 8, 9, 10}));
  slots_ = held_slots;
  EXPECT_TRUE(slots_hold(0, held));
  moecached_lane_close(other);
}

TEST_F(DaemonDeath, ModelsAreNotOpenedWithoutADaemon) {
  daemon_->hang_up();
  std::vector<const char*> paths;
  for (const std::string& path : model_file_.paths()) paths.push_back(path.c_str());
  moecached_model* second = nullptr;
  EXPECT_EQ(moecached_model_open(session_, paths.data(), paths.size(), &second), MOECACHED_E_UNAVAILABLE);
  EXPECT_EQ(second, nullptr);
}

TEST_F(DaemonDeath, ReconnectFindsNoDaemonAndChangesNothing) {
  daemon_.reset();
  std::filesystem::remove(socket_);
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_UNAVAILABLE);
  EXPECT_EQ(moecached_model_generation(model_), 1u);
  ASSERT_EQ(resolve(0, {9}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(0, {9}));
}

TEST_F(DaemonDeath, ReconnectWhileConnectedDoesNothing) {
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_OK);
  EXPECT_EQ(counters().reconnects, 0u);
  EXPECT_EQ(moecached_model_generation(model_), 1u);
}

TEST_F(DaemonDeath, ReconnectTakesUpAnotherDaemonWithOtherSlots) {
  ASSERT_EQ(resolve(0, {1, 2}), MOECACHED_OK);
  moecached_part_info part{};
  ASSERT_EQ(moecached_model_part(model_, 1, 1, &part), MOECACHED_OK);
  daemon_->hang_up();
  ASSERT_EQ(resolve(0, {9, 10}), MOECACHED_OK);  // from the file
  moecached_lane_end(lane_);
  const moecached_counters before = counters();
  ASSERT_EQ(before.fallback_reads, 2u);

  TestModel::Shape shape = model_file_.shape();
  shape.n_slots = 11;
  const TestModel larger(shape);  // the same bytes; only the daemon's view of the slots differs
  daemon_.reset();
  daemon_ = std::make_unique<FakeDaemon>(socket_, larger, FakeOptions{.boot_epoch = 0x9999});
  ASSERT_EQ(moecached_session_reconnect(session_), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(moecached_session_connected(session_), 1);
  EXPECT_EQ(moecached_model_generation(model_), 2u);
  EXPECT_EQ(layer(0).n_slots, 11u);
  EXPECT_STREQ(part.name, "blk.2.part_1.weight") << "names handed out earlier stay valid";

  const Ids ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  ASSERT_EQ(resolve(0, ids), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(0, ids));
  for (const std::int32_t slot : slots_) EXPECT_LT(slot, 11);
  const moecached_counters after = counters();
  EXPECT_EQ(after.reconnects, 1u);
  EXPECT_EQ(after.fallback_reads, before.fallback_reads);
  EXPECT_EQ(after.lookups, before.lookups + 11);
  EXPECT_EQ(daemon_->lane_words(0).fallback_reads, 2u) << "the new daemon can tell what was read without one";
  daemon_.reset();  // it looks at `larger`
}

TEST_F(DaemonDeath, ReconnectMovesAllLanesAndStreams) {
  moecached_lane* other = nullptr;
  ASSERT_EQ(moecached_lane_open(model_, &other), MOECACHED_OK);
  const Ids experts{3, 4};
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 2, 1), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(lane_, 1, &data), MOECACHED_OK);
  start_daemon({.boot_epoch = 2});
  ASSERT_EQ(moecached_session_reconnect(session_), MOECACHED_OK) << moecached_last_error();
  daemon_->wait_for_open_lanes(2);
  // The old daemon's buffer is gone; the half still answers, now from the file.
  ASSERT_EQ(moecached_stream_wait(lane_, 1, &data), MOECACHED_OK);
  EXPECT_TRUE(model_file_.part_is(0, 2, 3, data));
  ASSERT_EQ(resolve_on(other, 1, {8}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(1, {8}));
  ASSERT_EQ(moecached_stream_begin(other, 0, 2, experts.data(), 2, 0), MOECACHED_OK);
  ASSERT_EQ(moecached_stream_wait(other, 0, &data), MOECACHED_OK);
  EXPECT_TRUE(model_file_.part_is(0, 2, 3, data));
  EXPECT_EQ(counters().streamed_experts, 4u);
  moecached_lane_close(other);
}

TEST_F(DaemonDeath, AHalfThatWasAskedForIsReadAlsoWhereTheNextDaemonsAreSmaller) {
  TestModel::Shape shape = model_file_.shape();
  shape.stream_half_bytes *= 2;
  const TestModel larger(shape);
  daemon_.reset();
  daemon_ = std::make_unique<FakeDaemon>(socket_, larger, FakeOptions{.boot_epoch = 0x9999});
  moecached_lane_close(lane_);
  moecached_model_close(model_);
  moecached_session_close(session_);
  ASSERT_EQ(open_session(), MOECACHED_OK) << moecached_last_error();
  ASSERT_EQ(open_model(), MOECACHED_OK) << moecached_last_error();
  ASSERT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
  Ids experts;
  while (experts.size() < moecached_stream_capacity(lane_, 0, 0))
    experts.push_back(static_cast<std::int32_t>(experts.size()));
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 0, experts.data(), experts.size(), 0), MOECACHED_OK);
  start_daemon({.boot_epoch = 0xaaaa});
  ASSERT_EQ(moecached_session_reconnect(session_), MOECACHED_OK) << moecached_last_error();
  ASSERT_LT(moecached_stream_capacity(lane_, 0, 0), experts.size());
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(lane_, 0, &data), MOECACHED_OK) << moecached_last_error();
  const std::uint64_t bytes = shape.part_bytes[0];
  for (const std::int32_t expert : experts) {
    const auto* at = static_cast<const std::byte*>(data) + static_cast<std::size_t>(expert) * bytes;
    EXPECT_TRUE(model_file_.part_is(0, 0, static_cast<std::uint32_t>(expert), at)) << expert;
  }
}

TEST_F(DaemonDeath, ReconnectRefusesADaemonThatDescribesTheModelInAnotherWay) {
  start_daemon(
      {.boot_epoch = 2, .spoil_model = [](ModelSegmentView view) { view.parts[4].file_offset += 1; }});
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_VERSION);
  EXPECT_EQ(moecached_session_connected(session_), 0);
  ASSERT_EQ(resolve(1, {7}), MOECACHED_OK);
  EXPECT_TRUE(slots_hold(1, {7}));
}

TEST_F(DaemonDeath, ReconnectRefusesAChangedFile) {
  std::filesystem::resize_file(model_file_.paths()[1],
                               std::filesystem::file_size(model_file_.paths()[1]) + 1);
  start_daemon({.boot_epoch = 2});
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_MODEL_CHANGED);
}

}  // namespace
}  // namespace moecached::client::test
