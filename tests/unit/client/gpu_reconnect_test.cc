// The daemon goes away under a model on a GPU: work goes on, and a new daemon is taken up when it has loaded.
#include <thread>

#include "tests/unit/client/gpu_fixture.h"

namespace moecached::client::test {
namespace {

class GpuReconnect : public GpuClientTest {
 protected:
  void SetUp() override { open_all(); }
  [[nodiscard]] std::uint64_t window() const {
    moecached_part_info part{};
    std::uint64_t address = 0;
    EXPECT_EQ(moecached_gpu_model_part(model_, 0, 0, &part, &address), MOECACHED_OK);
    return address;
  }
  // The gate lets one attempt in two seconds through.
  [[nodiscard]] moecached_status reconnect_when_allowed() {
    for (;;) {
      const moecached_status status = moecached_session_reconnect(session_);
      if (std::string(moecached_last_error()).find("less than 2 s ago") == std::string::npos ||
          status == MOECACHED_OK) {
        return status;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
};

TEST_F(GpuReconnect, WithoutADaemonTheLastTableServes) {
  daemon_->gpu().put(0, 2, 7);
  daemon_->gpu().set_entry(0, 7, 2);
  run_epoch(lane_);
  daemon_->hang_up();
  EXPECT_EQ(moecached_session_connected(session_), 0);
  for (int i = 0; i < 20; ++i) run_epoch(lane_, {{1, 2, 3, 4}});
  EXPECT_TRUE(holds_all());
  EXPECT_EQ(words().completed, 21u);
}

TEST_F(GpuReconnect, MovesWindowsAndLanesToTheNextDaemon) {
  moecached_gpu_lane* const second = open_lane();
  run_epoch(lane_);
  run_epoch(second);
  moecached_part_info part{};
  std::uint64_t old_window = 0;
  ASSERT_EQ(moecached_gpu_model_part(model_, 0, 0, &part, &old_window), MOECACHED_OK);
  start_daemon({}, 0x9999);
  daemon_->gpu().put(1, 4, 6);
  daemon_->gpu().set_entry(1, 6, 4);
  daemon_->gpu().set_all_resident(2, 0);
  ASSERT_EQ(moecached_session_reconnect(session_), MOECACHED_OK) << moecached_last_error();
  daemon_->wait_for_open_lanes(2);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u);
  EXPECT_NE(window(), old_window);
  EXPECT_STREQ(part.name, "blk.1.part_0.weight") << "names handed out earlier stay valid";
  EXPECT_EQ(slot_of(1, 6), 4);
  EXPECT_TRUE(holds_all());
  run_epoch(lane_, {{1, 2, 3, 4}});
  run_epoch(second);
  EXPECT_EQ(words(0).completed, 1u);
  EXPECT_EQ(words(1).completed, 1u);
  EXPECT_EQ(daemon_->gpu().log_entry(0, 1).slots, (std::vector<std::vector<std::int32_t>>{{1, 2, 3, 4}}));
}

TEST_F(GpuReconnect, StaysOnTheOldMappingUntilTheNextDaemonHasLoaded) {
  const std::uint64_t old_window = window();
  FakeGpuOptions loading;
  loading.load_state = MOECACHED_LOADING;
  start_daemon(loading, 2);
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_UNAVAILABLE);
  EXPECT_NE(std::string(moecached_last_error()).find("still loading"), std::string::npos)
      << moecached_last_error();
  EXPECT_EQ(window(), old_window);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 1u);
  EXPECT_TRUE(holds_all());
  run_epoch(lane_);
  EXPECT_EQ(words().begun, 0u) << "the new daemon's lane is idle";
  daemon_->gpu().set_load_state(MOECACHED_COVERED);
  // The prepared move is taken, not opened again.
  const std::string calls =
      cuda_.calls_of([&] { EXPECT_EQ(reconnect_when_allowed(), MOECACHED_OK) << moecached_last_error(); });
  EXPECT_EQ(calls.find("cuMemImportFromShareableHandle"), std::string::npos);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 2u);
  EXPECT_NE(window(), old_window);
  run_epoch(lane_);
  EXPECT_EQ(words().completed, 1u);
}

TEST_F(GpuReconnect, APreparedMoveIsDroppedWhenLanesChangeOrTheDaemonGoes) {
  FakeGpuOptions loading;
  loading.load_state = MOECACHED_LOADING;
  start_daemon(loading, 2);
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_UNAVAILABLE);
  moecached_gpu_lane_close(lane_);
  lanes_.clear();
  lane_ = open_lane();  // on the old connection
  run_epoch(lane_);
  EXPECT_EQ(reconnect_when_allowed(), MOECACHED_E_UNAVAILABLE);
  start_daemon({}, 3);
  EXPECT_EQ(reconnect_when_allowed(), MOECACHED_OK) << moecached_last_error();
  run_epoch(lane_);
  EXPECT_EQ(words().completed, 1u);
}

TEST_F(GpuReconnect, RefusesADaemonThatDescribesTheModelInAnotherWay) {
  FakeGpuOptions other;
  other.spoil = [](GpuSegmentView view) { view.parts[4].file_offset -= 1; };
  start_daemon(other, 2);
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_VERSION);
  EXPECT_TRUE(holds_all());
  run_epoch(lane_);
}

TEST_F(GpuReconnect, ADaemonThatCannotReadTheFileIsNotTaken) {
  FakeGpuOptions failed;
  failed.load_state = MOECACHED_LOAD_FAILED;
  start_daemon(failed, 2);
  EXPECT_EQ(moecached_session_reconnect(session_), MOECACHED_E_IO);
  EXPECT_EQ(moecached_gpu_model_generation(model_), 1u);
  EXPECT_TRUE(holds_all());
}

}  // namespace
}  // namespace moecached::client::test
