// Models on a GPU under lanes that compute while the daemon swaps as fast as it can (gpu_daemon_fixture.h).
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/gpu_daemon_fixture.h"
#include "tests/support/safetensors_builder.h"

namespace moecached {
namespace {

TEST_F(GpuDaemonTest, DeviceSlotsAreAddedBehindTheFirstGraphAndFilled) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(report().device_bytes, 0u);
  const auto first = client.graphs(1, 1);
  EXPECT_EQ(first.wrong, 0u);
  EXPECT_EQ(first.device_slots, 0u);
  GpuClient::Outcome later;
  EXPECT_TRUE(eventually([&] {
    later += client.graphs(2, 5);
    return resident() == kLayers * 6;
  }));
  later += client.graphs(3, 50);
  EXPECT_EQ(later.wrong, 0u);
  EXPECT_GT(later.device_slots, 0u);
  EXPECT_GT(report().device_bytes, 0u);
}

TEST_F(GpuDaemonTest, ExpertsThatAreTensorsOfTheirOwnAreLoadedAndPromoted) {
  start(kSix);
  std::vector<std::filesystem::path> files;
  const test::HfSpec spec{.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK, .n_shards = 3};
  for (const auto& content : test::make_hf(spec).files()) {
    files.push_back(folder_ / ("file-" + std::to_string(files.size())));
    test::write_file(files.back(), content);
  }
  GpuClient client(folder_, files);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(2, 5);
    return resident() == kLayers * 6;
  }));
  out += client.graphs(3, 5);  // the slots may have been filled behind the last graph
  EXPECT_EQ(out.wrong, 0u);
  EXPECT_GT(out.device_slots, 0u);
  std::uint32_t file = 99;
  std::uint64_t offset = 0;
  EXPECT_EQ(moecached_gpu_model_locate(client.model(), 1, 2, 5, &file, &offset), MOECACHED_OK);
  EXPECT_LT(file, 3u);
  EXPECT_EQ(moecached_gpu_model_locate(client.model(), 1, 2, kExperts, &file, &offset), MOECACHED_E_ARGUMENT);
}

TEST_F(GpuDaemonTest, EverySlotHoldsItsExpertWhileTheyAreSwappedUnderFourLanes) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient first(folder_, model_);
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(first.graphs(9, 5).wrong, 0u);
    return resident() > 0;
  })) << "a loaded machine may take a second for the device slots";
  std::atomic<std::size_t> wrong = 0, slots = 0, device = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      GpuClient client(folder_, model_);
      const auto out = client.graphs(seed, 1500);
      wrong += out.wrong;
      slots += out.slots;
      device += out.device_slots;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(slots, 4u * 1500 * kLayers * kTopK);
  EXPECT_GT(device, 0u);
  std::uint64_t evictions = 0;
  for (const LayerReport& layer : report().layers) evictions += layer.evictions;
  EXPECT_GT(evictions, 100u);
}

TEST_F(GpuDaemonTest, WhatIsFetchedIsRightWhileSlotsAreSwapped) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 3).wrong, 0u);
  client.fetch_from_now_on();
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(2, 50);
    return out.device_slots > 1000 && out.fetched > 1000;
  }));
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuDaemonTest, WithoutGracePeriodsTheSameReadersFindWrongBytes) {
  const Variable churn("MOECACHED_TEST_CHURN"), no_grace("MOECACHED_TEST_NO_GRACE");
  start(kSix);
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      GpuClient client(folder_, model_);
      std::uint32_t i = 0;
      EXPECT_TRUE(eventually([&] {
        wrong += client.graphs(seed + 7 * i++, 100).wrong;
        return wrong > 0;
      }));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(GpuDaemonTest, WhollyResidentLayersGetStocksShape) {
  start(kAll);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 3).wrong, 0u);
  const std::uint64_t generation = moecached_gpu_model_generation(client.model());
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(5, 2);
    moecached_gpu_layer_info info{};
    return moecached_gpu_model_layer(client.model(), kLayers - 1, &info) == MOECACHED_OK &&
           info.all_resident == 1 && info.n_slots == kExperts;
  }));
  EXPECT_NE(moecached_gpu_model_generation(client.model()), generation);
  const auto before = report().layers.front();
  const auto all = client.graphs(6, 50);
  EXPECT_EQ(out.wrong + all.wrong, 0u);
  EXPECT_EQ(all.device_slots, all.slots);
  EXPECT_TRUE(eventually([&] { return report().layers.front().hits > before.hits; }))
      << "counted without a row";
  EXPECT_EQ(daemon_->sessions().front().records_refused, 0u);
}

TEST_F(GpuDaemonTest, NothingIsPromotedBeforeItIsLoaded) {
  start(kAll, 100, "ewma", true);
  GpuClient client(folder_, model_);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(1, 1);
    return resident() == kLayers * kExperts;
  }));
  // Resident is an expert once its copy is done; entries are flipped behind that, while graphs go on.
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(2, 50);
    return out.device_slots > 0;
  }));
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuDaemonTest, ExpertsInUseEndUpInDeviceSlotsAndAreCounted) {
  start(kSix);
  GpuClient client(folder_, model_);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    const auto now = client.graphs(9, 10, 8, 6);  // six experts in use, six slots
    out += now;
    return now.device_slots == now.slots;
  }));
  EXPECT_EQ(out.wrong, 0u);
  client.graphs(10, 5, 8, 6);
  // Every graph is counted once its log is read: nothing was dropped at this pace.
  EXPECT_TRUE(eventually([&] { return report().epochs > 0 && daemon_->sessions().front().records > 0; }));
  const ModelReport model = report();
  std::uint64_t lookups = 0, hits = 0;
  for (const LayerReport& layer : model.layers) {
    lookups += layer.lookups;
    hits += layer.hits;
  }
  EXPECT_GT(hits, 0u);
  EXPECT_LE(hits, lookups);
  EXPECT_EQ(daemon_->sessions().front().records_refused, 0u);
}

TEST_F(GpuDaemonTest, ARecordingSaysWhatGraphsUsedWhileSlotsAreSwapped) {
  constexpr int kGraphs = 300;
  start(kSix);
  GpuClient client(folder_, model_);
  auto recording = daemon_->open_recording(0);
  ASSERT_TRUE(recording) << recording.error().text;
  std::mt19937 routing(8);
  for (int i = 1; i <= kGraphs; ++i) {
    EXPECT_EQ(client.graph(routing).wrong, 0u);
    // Fewer than the log has entries, so that none is lost.
    if (i % 10 == 0) {
      ASSERT_TRUE(eventually([&] { return report().epochs >= static_cast<std::uint64_t>(i); }));
    }
  }
  const auto lookups = [this] {
    std::uint64_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.lookups;
    return n;
  };
  std::uint64_t seen = 0;
  ASSERT_TRUE(eventually([&] { return std::exchange(seen, lookups()) == seen && seen > 0; }));
  std::map<std::uint64_t, std::vector<std::vector<std::uint32_t>>> recorded;  // by graph
  RoutingEvent event;
  std::vector<std::uint32_t> experts;
  std::uint64_t n_experts = 0;
  while (recording->tap->take(&event, &experts)) {
    auto& layers = recorded[event.graph];
    ASSERT_EQ(event.layer.value, layers.size());
    ASSERT_EQ(event.n_tokens, 1u);
    layers.push_back(experts);
    n_experts += experts.size();
  }
  EXPECT_EQ(recording->tap->dropped(), 0u);
  EXPECT_EQ(n_experts, lookups());
  // The client's choices again.
  std::mt19937 random(8);
  auto next = recorded.begin();
  for (int i = 0; i < kGraphs && next != recorded.end(); ++i) {
    std::vector<std::vector<std::uint32_t>> layers(kLayers);
    for (auto& wanted : layers) {
      const auto first = static_cast<std::uint32_t>(random());
      for (std::uint32_t k = 0; k < kTopK; ++k) wanted.push_back((first + k) % kExperts);
    }
    if (next->second == layers) ++next;
  }
  EXPECT_EQ(next, recorded.end());
  EXPECT_EQ(recorded.size(), static_cast<std::size_t>(kGraphs));
  daemon_->close_recording(recording->tap);
}

TEST_F(GpuDaemonTest, TenThousandPolicySwapsWhileLanesComputeLoseNoLookupAndNoByte) {
  constexpr int kSwaps = 10'000;
  start(kSix, 100, "lru");
  std::vector<std::unique_ptr<GpuClient>> clients(2);
  std::atomic<bool> done = false;
  std::array<std::atomic<std::uint64_t>, 2> slots{};
  std::atomic<std::size_t> wrong = 0, ready = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < clients.size(); ++i) {
    threads.emplace_back([&, i] {  // a client stays on its thread
      clients[i] = std::make_unique<GpuClient>(folder_, model_);
      ++ready;
      // What a lane computes before the daemon has taken it up is not counted, swaps or not.
      EXPECT_TRUE(eventually([&] {
        std::uint32_t lanes = 0;
        for (const SessionReport& session : daemon_->sessions()) lanes += session.lanes;
        return lanes == clients.size();
      }));
      std::mt19937 random(i + 1);
      while (!done) {
        const GpuClient::Outcome out = clients[i]->graph(random, 4 * i, kExperts - 4);
        wrong += out.wrong;
        slots[i] += out.slots;
      }
      std::string figures;
      const auto all_counted = [&] {
        std::uint64_t counted = 0, dropped = 0, refused = 0;
        for (const LayerReport& layer : report().layers) counted += layer.lookups;
        for (const SessionReport& session : daemon_->sessions()) {
          dropped += session.records_dropped;
          refused += session.records_refused;
        }
        figures = std::to_string(counted) + " counted, " + std::to_string(dropped) + " dropped, " +
                  std::to_string(refused) + " refused of " + std::to_string(slots[0] + slots[1]);
        return counted + dropped * kLayers * kTopK == slots[0] + slots[1];
      };
      ++ready;
      EXPECT_TRUE(eventually([&] { return ready >= 4 && all_counted(); })) << figures;
      ++ready;
      EXPECT_TRUE(eventually([&] { return ready == 6; }));
      clients[i].reset();
    });
  }
  EXPECT_TRUE(eventually([&] { return ready >= 2 && resident() > 0; }));
  static constexpr const char* kSpecs[] = {
      "ewma:decay=900", "slru",  "learned", "lfu:admit=value", "arc", "static", "lru:admit=value",
      "s3fifo",         "sieve", "ewma",    "wtinylfu"};
  std::uint64_t seen = 0, swaps_between_graphs = 0;
  for (std::size_t i = 0; i < kSwaps; ++i) {
    const auto set =
        daemon_->set_policy(i % 2 == 0 ? PolicyTarget{.tier = "gpu"} : PolicyTarget{.model = report().id},
                            kSpecs[i % std::size(kSpecs)]);
    EXPECT_TRUE(set) << set.error().text;
    const std::uint64_t now = slots[0] + slots[1];
    swaps_between_graphs += now != std::exchange(seen, now) ? 1 : 0;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(swaps_between_graphs, 100u);
  std::uint64_t insertions = 0, evictions = 0;
  for (const LayerReport& layer : report().layers) {
    insertions += layer.insertions;
    evictions += layer.evictions;
  }
  EXPECT_GT(evictions, 0u);
  EXPECT_EQ(insertions - evictions, resident());
  const PolicyReport gpu_default = daemon_->policies()[1];
  EXPECT_EQ(gpu_default.tier, "gpu");
  EXPECT_EQ(gpu_default.spec, kSpecs[(kSwaps - 2) % std::size(kSpecs)]);
  EXPECT_EQ(report().policy, kSpecs[(kSwaps - 1) % std::size(kSpecs)]);
}

TEST_F(GpuDaemonTest, PromptsFillFreeSlotsAndEvictNothing) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_TRUE(eventually([&] {
    client.graphs(1, 5, 0, kExperts, true);
    return resident() == kLayers * 6;
  })) << "prompts alone fill what is free";
  const auto evictions = [&] {
    std::uint64_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.evictions;
    return n;
  };
  EXPECT_EQ(evictions(), 0u);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    const auto now = client.graphs(2, 10, 8, 6);  // decode takes all six slots
    out += now;
    return now.device_slots == now.slots;
  }));
  const std::uint64_t before = evictions();
  EXPECT_GT(before, 0u) << "the six of decode were not those of the prompts";
  for (std::uint32_t i = 0; i < 30; ++i) {
    const std::uint64_t epochs = report().epochs;
    out += client.graphs(3 + i, 10, 0, kExperts, true);  // as many as the log has room for
    EXPECT_TRUE(eventually([&] { return report().epochs >= epochs + 10; }));
  }
  EXPECT_EQ(evictions(), before);
  const auto again = client.graphs(4, 10, 8, 6);
  EXPECT_EQ(again.device_slots, again.slots);
  EXPECT_EQ(out.wrong + again.wrong, 0u);
}

TEST_F(GpuDaemonTest, SecondProcessFindsEverythingLoaded) {
  start(kSix);
  GpuClient first(folder_, model_);
  EXPECT_TRUE(eventually([&] {
    first.graphs(1, 5);
    return resident() == kLayers * 6;
  }));
  const std::uint64_t bytes = report().bytes_read, device = report().device_bytes;
  GpuClient second(folder_, model_);
  const auto out = second.graphs(2, 20);
  EXPECT_EQ(out.wrong, 0u);
  EXPECT_GT(out.device_slots, 0u) << "it maps the device slots that are there";
  EXPECT_EQ(report().bytes_read, bytes);
  EXPECT_EQ(report().device_bytes, device);
  EXPECT_EQ(daemon_->models().size(), 1u);
}

TEST_F(GpuDaemonTest, DaemonDiesAndARestartedOneTakesOver) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 100).wrong, 0u);
  daemon_.reset();
  EXPECT_EQ(client.graphs(2, 100).wrong, 0u);
  start(kSix);
  const std::uint64_t generation = moecached_gpu_model_generation(client.model());
  EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
      << moecached_last_error();
  EXPECT_NE(moecached_gpu_model_generation(client.model()), generation);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(3, 10);
    return resident() == kLayers * 6;
  }));
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuDaemonTest, LaneThatStopsInItsEpochKeepsItsSlots) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient stopped(folder_, model_), other(folder_, model_);
  EXPECT_EQ(other.graphs(1, 200).wrong, 0u);
  ASSERT_EQ(moecached_gpu_lane_begin(stopped.lane()), MOECACHED_OK);
  EXPECT_TRUE(eventually([&] { return daemon_->sessions().front().stalled; }));
  EXPECT_EQ(other.graphs(2, 200).wrong, 0u);
}

TEST_F(GpuDaemonTest, UnknownGpuAndBrokenModelAreRefusedAndTheSessionGoesOn) {
  start(kSix);
  const auto bad = folder_ / "bad.gguf";
  std::ofstream(bad) << "this is not a model, but it is longer than a header";
  GpuClient good(folder_, model_);
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "bad", &session), MOECACHED_OK);
  const char* path = bad.c_str();
  moecached_gpu_model* model = nullptr;
  const GpuId gpu = gpu_at(0);
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu.uuid.data(), &model), MOECACHED_E_REFUSED);
  path = model_.c_str();
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu.uuid.data(), &model), MOECACHED_OK)
      << moecached_last_error();
  moecached_gpu_model_close(model);
  moecached_session_close(session);
  EXPECT_EQ(good.graphs(1, 50).wrong, 0u);
}

TEST_F(GpuDaemonTest, ModelOnAGpuIsDroppedWhenUnused) {
  start(kSix);
  {
    GpuClient client(folder_, model_);
    client.graphs(1, 50);
    EXPECT_FALSE(daemon_->drop_model(report().id));
  }
  EXPECT_TRUE(eventually([&] { return report().sessions == 0; }));
  EXPECT_TRUE(
      eventually([&] { return daemon_->models().empty() || bool(daemon_->drop_model(report().id)); }));
  EXPECT_TRUE(daemon_->models().empty());
}

}  // namespace
}  // namespace moecached
