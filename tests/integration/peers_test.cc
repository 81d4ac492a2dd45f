// The peer tier: GPUs that compute one model read each other's slots (gpu_daemon_fixture.h).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/gpu_daemon_fixture.h"
#include "tests/support/soft_cuda/library.h"

namespace moecached {
namespace {

class PeersTest : public GpuDaemonTest {
 protected:
  // Large enough for the sections of eight GPUs.
  [[nodiscard]] test::MoeSpec spec() const override {
    return {.n_layers = kLayers,
            .n_experts = kExperts,
            .n_expert_used = kTopK,
            .n_embd = 128,
            .n_ff = 128,
            .gate_type = 1,
            .up_type = 1,
            .down_type = 1};
  }
  ModelReport report_of(std::size_t gpu) {
    const std::string name = to_string(gpu_at(gpu));
    for (const ModelReport& model : daemon_->models()) {
      if (model.device == name) return model;
    }
    return {};
  }
  [[nodiscard]] bool doctor_says(const std::string& severity, const std::string& part) {
    for (const Finding& finding : daemon_->doctor()) {
      if (finding.severity == severity && finding.text.find(part) != std::string::npos) return true;
    }
    return false;
  }
  // Both compute until the first has read more slots of the other; nothing was wrong.
  void read_again(GpuClient& first, GpuClient& second) {
    const std::uint64_t before = report_of(0).peer_hits;
    std::uint32_t seed = 1;
    EXPECT_TRUE(eventually([&] {
      EXPECT_EQ(first.graphs(seed++, 5).wrong, 0u);
      EXPECT_EQ(second.graphs(seed++, 5).wrong, 0u);
      return report_of(0).peer_hits > before + 100;
    }));
  }
  // The same until each has read slots of the other.
  void read_each_other(GpuClient& first, GpuClient& second) {
    std::uint32_t seed = 1;
    EXPECT_TRUE(eventually([&] {
      EXPECT_EQ(first.graphs(seed++, 5).wrong, 0u);
      EXPECT_EQ(second.graphs(seed++, 5).wrong, 0u);
      return report_of(0).peer_hits > 100 && report_of(1).peer_hits > 100;
    }));
  }
  struct Rate {
    std::uint64_t lookups, hits;
  };
  Rate rate_of(std::size_t gpu) {
    Rate rate{};
    for (const LayerReport& layer : report_of(gpu).layers) {
      rate.lookups += layer.lookups;
      rate.hits += layer.hits;
    }
    return rate;
  }

  const Variable devices_{"SOFT_CUDA_DEVICES", "2"};  // until behind TearDown
};

class ManyPeersTest : public PeersTest, public ::testing::WithParamInterface<int> {
 protected:
  ManyPeersTest() { ::setenv("SOFT_CUDA_DEVICES", std::to_string(GetParam()).c_str(), 1); }
  // Each GPU computes in a thread of its own while all swap as fast as they can.
  GpuClient::Outcome swap_under_all(std::size_t n_peer_hits) {
    std::atomic<int> n_done = 0;
    std::atomic<std::uint64_t> n_refused = 0;
    std::vector<GpuClient::Outcome> outcomes(static_cast<std::size_t>(GetParam()));
    std::vector<std::thread> threads;
    for (int gpu = 0; gpu < GetParam(); ++gpu) {
      threads.emplace_back([&, gpu] {
        GpuClient client(folder_, model_, gpu);
        bool is_done = false;
        EXPECT_TRUE(eventually([&] {
          outcomes[static_cast<std::size_t>(gpu)] += client.graphs(static_cast<std::uint32_t>(gpu + 1), 5);
          const ModelReport report = report_of(static_cast<std::size_t>(gpu));
          const std::size_t n_peers = static_cast<std::size_t>(GetParam() - 1);
          if (!is_done && outcomes[static_cast<std::size_t>(gpu)].device_slots > 0 &&
              report.peers.size() == n_peers && (n_peers == 0 || report.peer_hits > n_peer_hits)) {
            is_done = true;
            ++n_done;
          }
          for (const SessionReport& session : daemon_->sessions())
            n_refused = session.records_refused + n_refused;
          return n_done == GetParam();  // the others read this one's slots until then
        }));
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(n_refused, 0u) << "what kernels read was not known to the daemon";
    GpuClient::Outcome all;
    for (const GpuClient::Outcome& outcome : outcomes) all += outcome;
    return all;
  }
};

TEST_P(ManyPeersTest, EverySlotHoldsItsExpertWhileAllSwapAndReadEachOther) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  const GpuClient::Outcome all = swap_under_all(200);
  EXPECT_EQ(all.wrong, 0u) << "of " << all.slots << ", " << all.device_slots << " on a GPU";
  EXPECT_GT(all.device_slots, 0u);
}

INSTANTIATE_TEST_SUITE_P(Gpus, ManyPeersTest, ::testing::Values(1, 2, 4, 8));

TEST_F(PeersTest, WithoutGracePeriodsTheSameReadersFindWrongBytes) {
  const Variable churn("MOECACHED_TEST_CHURN"), no_grace("MOECACHED_TEST_NO_GRACE");
  start(kSix);
  // One computes, so that every wrong byte of it is in a slot that the other GPU gives to somebody else: its
  // own slots are as many as it has, and are not swapped.
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  std::uint32_t seed = 1;
  std::size_t wrong = 0;
  EXPECT_TRUE(eventually([&] {
    (void)second.graphs(seed++, 1);
    wrong += first.graphs(seed++, 20).wrong;
    return wrong > 0;
  }));
}

TEST_F(PeersTest, SpreadTheExpertsSoThatMoreAreOnAnyGpu) {
  start(kSix);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  read_each_other(first, second);
  // 6 of 16 slots each: alone 37.5 % of uniform lookups hit, together 75 %.
  std::uint32_t seed = 1000;
  EXPECT_TRUE(eventually([&] {
    const Rate before = rate_of(0);
    EXPECT_EQ(first.graphs(seed++, 40).wrong, 0u);
    EXPECT_EQ(second.graphs(seed++, 40).wrong, 0u);
    const Rate after = rate_of(0);
    return after.lookups > before.lookups && static_cast<double>(after.hits - before.hits) >
                                                 0.6 * static_cast<double>(after.lookups - before.lookups);
  }));
  EXPECT_GT(report_of(0).bytes_from_peers, 0u);
}

TEST_F(PeersTest, AProcessThatCannotMapThemIsNeverNamedOne) {
  start(kSix);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  read_each_other(first, second);
  {
    std::unique_ptr<GpuClient> blind;
    {
      const Variable off("MOECACHED_PEERS", "0");
      blind = std::make_unique<GpuClient>(folder_, model_, 0);
    }
    // Its windows have nothing where the other's slots are: to read one would end this process.
    std::uint32_t seed = 1;
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(blind->graphs(seed++, 5).wrong, 0u);
      EXPECT_EQ(first.graphs(seed++, 5).wrong, 0u);
      EXPECT_EQ(second.graphs(seed++, 5).wrong, 0u);
    }
    EXPECT_TRUE(report_of(0).peers.empty());
    EXPECT_EQ(report_of(1).peers.size(), 1u) << "the other GPU's table is its own affair";
    EXPECT_TRUE(doctor_says("note", "MOECACHED_PEERS is 0"));
  }
  read_again(first, second);  // when it has left
}

TEST_F(PeersTest, ASessionThatOpensItAgainAndCannotMapThemCountsAsOneThatCannot) {
  start(kSix);
  GpuClient second(folder_, model_, 1);
  {
    GpuClient first(folder_, model_, 0);
    read_each_other(first, second);
    const Variable off("MOECACHED_PEERS", "0");
    const char* path = model_.c_str();
    moecached_gpu_model* again = nullptr;
    ASSERT_EQ(moecached_gpu_model_open(first.session(), &path, 1, gpu_at(0).uuid.data(), &again),
              MOECACHED_OK)
        << moecached_last_error();
    EXPECT_TRUE(report_of(0).peers.empty());
    EXPECT_EQ(first.graphs(1, 50).wrong, 0u);
    moecached_gpu_model_close(again);
  }
  GpuClient first(folder_, model_, 0);
  read_again(first, second);
}

TEST_F(PeersTest, WithoutPeerAccessRamIsReadAndTheDoctorSaysSo) {
  const Variable none("SOFT_CUDA_NO_PEERS");
  start(kSix);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  std::uint32_t seed = 1;
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(first.graphs(seed++, 5).wrong, 0u);
    EXPECT_EQ(second.graphs(seed++, 5).wrong, 0u);
    return resident() > 0 && doctor_says("note", "the driver lets neither");
  }));
  EXPECT_TRUE(report_of(0).peers.empty());
  EXPECT_EQ(report_of(0).peer_hits + report_of(1).peer_hits, 0u);
}

TEST_F(PeersTest, SwitchedOffNoneIsRead) {
  peers_ = false;
  start(kSix);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  for (std::uint32_t seed = 1; seed < 100; ++seed) {
    EXPECT_EQ(first.graphs(seed, 5).wrong, 0u);
    EXPECT_EQ(second.graphs(seed, 5).wrong, 0u);
  }
  EXPECT_EQ(report_of(0).peer_hits + report_of(1).peer_hits, 0u);
}

TEST_F(PeersTest, WhatFitsAsAWholeIsOnEveryGpuAndHasStocksShape) {
  start(kAll);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  std::uint32_t seed = 1;
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(first.graphs(seed++, 5).wrong, 0u);
    EXPECT_EQ(second.graphs(seed++, 5).wrong, 0u);
    moecached_gpu_layer_info last{};
    EXPECT_EQ(moecached_gpu_model_layer(second.model(), kLayers - 1, &last), MOECACHED_OK);
    return last.all_resident != 0;
  }));
}

TEST_F(PeersTest, AGpuThatIsLostTakesOnlyItsSessionsAlong) {
  const test::SoftCuda soft;
  start(kSix);
  GpuClient first(folder_, model_, 0);
  auto second = std::make_unique<GpuClient>(folder_, model_, 1);
  read_each_other(first, *second);
  // Its client stops in the midst of an epoch and never moves again.
  EXPECT_EQ(moecached_gpu_lane_begin(second->lane()), MOECACHED_OK);
  soft.get<decltype(soft_cuda_lose)>("soft_cuda_lose")(1);
  std::uint32_t seed = 1;
  // What is used changes, so that slots are given to others.
  const auto compute = [&] {
    EXPECT_EQ(first.graphs(seed, 20, (seed / 50) % 2 * 8, 8).wrong, 0u);
    ++seed;
  };
  EXPECT_TRUE(eventually([&] {
    compute();
    return report_of(0).peers.empty();
  }));
  // Nothing is known of what it reads, so it is waited for, until its process ends.
  soft.get<decltype(soft_cuda_lose)>("soft_cuda_lose")(-1);  // for its process, which has another context
  EXPECT_EQ(moecached_gpu_lane_begin(second->lane()), MOECACHED_E_UNAVAILABLE) << moecached_last_error();
  second.reset();
  const std::uint64_t before = report_of(0).bytes_uploaded;
  EXPECT_TRUE(eventually([&] {
    compute();
    return report_of(0).bytes_uploaded > before;
  }));
  GpuClient third(folder_, model_, 0);  // finds nothing that it cannot map
  EXPECT_EQ(third.graphs(7, 20).wrong, 0u);
  EXPECT_TRUE(doctor_says("error", "counts as lost"));
}

TEST_F(PeersTest, AModelWhoseSlotsAreReadIsNotDroppedAndComesBack) {
  start(kSix);
  auto first = std::make_unique<GpuClient>(folder_, model_, 0);
  auto second = std::make_unique<GpuClient>(folder_, model_, 1);
  read_each_other(*first, *second);
  const std::uint32_t id = report_of(1).id;
  second.reset();
  ASSERT_TRUE(eventually([&] { return report_of(1).sessions == 0; }));
  const Status refused = daemon_->drop_model(id);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().text.find("another GPU"), std::string::npos) << refused.error().text;
  EXPECT_EQ(first->graphs(1, 20).wrong, 0u);
  first.reset();
  ASSERT_TRUE(eventually([&] { return daemon_->drop_model(id).has_value(); }));
  GpuClient again(folder_, model_, 0), other(folder_, model_, 1);
  EXPECT_NE(report_of(1).id, id);
  read_each_other(again, other);
}

}  // namespace
}  // namespace moecached
