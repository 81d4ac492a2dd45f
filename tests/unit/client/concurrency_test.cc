// Several lanes in several threads against a daemon that evicts all the time. Every slot is compared with the
// file while its epoch lasts, so a slot reused too early shows as wrong bytes; sanitizers watch the client's
// own memory.
#include <atomic>
#include <random>
#include <thread>

#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

class ManyLanes : public ClientTest {
 protected:
  ManyLanes()
      : ClientTest({.n_layers = 2,
                    .n_experts = 24,
                    .n_slots = 10,
                    .n_expert_used = 4,
                    .n_files = 1,
                    .part_bytes = {300, 77}}) {}
  void SetUp() override { open_all(); }

  // Resolves random sets and checks them; returns how many were wrong.
  int run_lane(unsigned seed, int rounds) {
    moecached_lane* lane = nullptr;
    if (moecached_lane_open(model_, &lane) != MOECACHED_OK) return rounds;
    std::mt19937 random(seed);
    int wrong = 0;
    for (int round = 0; round < rounds; ++round) {
      const std::uint32_t layer = random() % 2;
      std::int32_t ids[4];
      std::int32_t slots[4];
      for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 24);
      if (moecached_lane_resolve(lane, layer, ids, 1, 4, sizeof ids, slots) != MOECACHED_OK) {
        ADD_FAILURE() << moecached_last_error();
        ++wrong;
        continue;
      }
      for (int i = 0; i < 4; ++i) wrong += !model_file_.slot_holds(infos_[layer], layer, slots[i], ids[i]);
      if (random() % 4 == 0) moecached_lane_end(lane);
    }
    moecached_lane_close(lane);
    return wrong;
  }

  int run_lanes(int n_threads, int rounds) {
    infos_ = {layer(0), layer(1)};
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
      threads.emplace_back([&, t] { wrong += run_lane(static_cast<unsigned>(t + 1), rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    return wrong;
  }

  std::vector<moecached_layer_info> infos_;
};

// The fake daemon evicts and loads in one step unless an epoch is in the way, so once an eviction is seen, a
// slot that was not protected would hold other bytes already.
TEST_F(ManyLanes, KeepTheirSlotsWhileAnotherLaneNeedsThem) {
  const std::vector<std::int32_t> held{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};  // all slots of the layer
  daemon_->make_resident(1, held);
  ASSERT_EQ(resolve(1, held), MOECACHED_OK);  // a hit: no lease protects them, only the epoch
  std::thread other([this] {
    moecached_lane* lane = nullptr;
    ASSERT_EQ(moecached_lane_open(model_, &lane), MOECACHED_OK);
    const std::int32_t ids[] = {20, 21, 22, 23};
    std::int32_t slots[4];
    EXPECT_EQ(moecached_lane_resolve(lane, 1, ids, 1, 4, sizeof ids, slots), MOECACHED_OK);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(model_file_.slot_holds(layer(1), 1, slots[i], ids[i]));
    moecached_lane_close(lane);
  });
  daemon_->wait_for_evictions(1);
  EXPECT_TRUE(slots_hold(1, held));
  moecached_lane_end(lane_);
  other.join();
  EXPECT_EQ(counters().fallback_reads, 0u)
      << "the other lane was served by the daemon once this one had ended";
}

TEST_F(ManyLanes, NeverSeeASlotReusedWithinAnEpoch) {
  EXPECT_EQ(run_lanes(2, 600), 0);
  EXPECT_GT(daemon_->evictions(), 100u);
  EXPECT_EQ(counters().lookups, 2u * 600 * 4);
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(ManyLanes, ShareThePrivateSlotsWhenTheDaemonIsGone) {
  daemon_->make_resident(0, {0, 1, 2, 3, 4});
  daemon_->hang_up();
  EXPECT_EQ(run_lanes(2, 600), 0);
  EXPECT_GT(counters().fallback_reads, 0u);
  EXPECT_GT(counters().hits, 0u);
}

TEST_F(ManyLanes, SurviveTheDaemonsEndInTheMiddle) {
  std::thread end([this] {
    daemon_->wait_for(MOECACHED_RECORD_LEASE, 40);
    daemon_->hang_up();
  });
  EXPECT_EQ(run_lanes(3, 400), 0);
  end.join();
  EXPECT_EQ(moecached_session_connected(session_), 0);
}

TEST_F(ManyLanes, MayBeOpenedAndClosedWhileOthersRun) {
  std::atomic<bool> done{false};
  std::thread opener([&] {
    while (!done) {
      moecached_lane* lane = nullptr;
      ASSERT_EQ(moecached_lane_open(model_, &lane), MOECACHED_OK);
      (void)counters();
      moecached_lane_close(lane);
    }
  });
  EXPECT_EQ(run_lanes(1, 300), 0);
  done = true;
  opener.join();
}

}  // namespace
}  // namespace moecached::client::test
