// The real client against the real daemon: threads that resolve random experts of a pool much too small, and
// everything that may happen to them meanwhile.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/client_daemon_fixture.h"

namespace moecached {
namespace {

TEST_F(ClientDaemonTest, EverySlotHoldsItsExpertWhileTheyAreSwappedUnderFourClients) {
  std::atomic<std::size_t> wrong = 0;
  std::atomic<std::uint64_t> fallback = 0, leases = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      Client client(folder_, model_);
      wrong += client.decode(seed, 150);
      fallback += client.counters().fallback_reads;
      leases += client.counters().leases;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(fallback, 0u);
  EXPECT_GT(leases, 0u);
}

// Tokens of four kinds: what a layer uses says what the next one will. One client waits after each layer
// until nothing is being read any more, so that what was read ahead is there in time; the others do not.
TEST_F(ClientDaemonTest, WhatIsReadAheadIsWhatTheFileHolds) {
  const auto report = [&] { return daemon_->models().front(); };
  const auto sum = [&](std::uint64_t LayerReport::*counter) {
    std::uint64_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.*counter;
    return n;
  };
  std::atomic<bool> stop = false;
  std::atomic<std::size_t> wrong = 0;
  const auto token = [&](Client& client, std::uint32_t kind, bool settles) {
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      std::int32_t ids[kTopK], slots[kTopK];
      for (std::uint32_t k = 0; k < kTopK; ++k) ids[k] = static_cast<std::int32_t>(4 * kind + k);
      ASSERT_EQ(moecached_lane_resolve(client.lane(), layer, ids, 1, kTopK, 0, slots), MOECACHED_OK)
          << moecached_last_error();
      for (std::size_t k = 0; k < kTopK; ++k) wrong += client.wrong_bytes(layer, ids[k], slots[k]);
      while (settles && report().coming > 0) std::this_thread::yield();
    }
    moecached_lane_end(client.lane());
  };
  Client settling(folder_, model_);
  std::mt19937 random(1);
  for (int i = 0; i < 5000 && sum(&LayerReport::prefetch_used) < 100; ++i)
    token(settling, random() % 4, true);
  EXPECT_GE(sum(&LayerReport::prefetch_used), 100u) << report().prefetch;

  std::vector<std::thread> threads;
  for (std::uint32_t seed = 2; seed <= 3; ++seed) {
    threads.emplace_back([&, seed] {
      Client client(folder_, model_);
      std::mt19937 own(seed);
      for (int i = 0; i < 400; ++i) token(client, own() % 4, false);
      EXPECT_EQ(client.counters().fallback_reads, 0u);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(settling.counters().fallback_reads, 0u);
}

TEST_F(ClientDaemonTest, PromptsOfOneClientCostAnotherOnesDecodeNoMiss) {
  Client decoder(folder_, model_), prompter(folder_, model_);
  // Four experts of six slots.
  const auto decode = [&] {
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      const std::int32_t ids[kTopK] = {3, 7, 11, 15};
      std::int32_t slots[kTopK];
      ASSERT_EQ(moecached_lane_resolve(decoder.lane(), layer, ids, 1, kTopK, 0, slots), MOECACHED_OK);
      for (std::size_t k = 0; k < kTopK; ++k) EXPECT_EQ(decoder.wrong_bytes(layer, ids[k], slots[k]), 0u);
    }
    moecached_lane_end(decoder.lane());
  };
  decode();
  const moecached_counters before = decoder.counters();
  std::mt19937 random(3);
  for (std::uint32_t i = 0; i < 60; ++i) {
    prompter.prompt(random, i % 3, 1 + i % 6);
    decode();
  }
  const moecached_counters after = decoder.counters();
  EXPECT_EQ(after.hits - before.hits, after.lookups - before.lookups);
  EXPECT_EQ(after.leases, before.leases);
  EXPECT_GT(prompter.prompts_granted, 10u) << "two slots are free for prompts";
  EXPECT_GT(prompter.prompts_told_to_stream, 10u);
  EXPECT_EQ(prompter.prompts_wrong_bytes, 0u);
  EXPECT_EQ(prompter.counters().fallback_reads, 0u);
}

TEST_F(ClientDaemonTest, CheckerSeesAWrongExpert) {
  Client client(folder_, model_);
  std::int32_t ids[2] = {1, 2}, slots[2];
  ASSERT_EQ(moecached_lane_resolve(client.lane(), 0, ids, 1, 2, 0, slots), MOECACHED_OK);
  EXPECT_EQ(client.wrong_bytes(0, ids[0], slots[0]), 0u);
  EXPECT_GT(client.wrong_bytes(0, ids[0], slots[1]), 0u);
}

TEST_F(ClientDaemonTest, PolicyChangesWhileClientsDecode) {
  std::atomic<bool> done = false;
  std::atomic<std::size_t> wrong = 0;
  std::thread decoder([&] {
    Client client(folder_, model_);
    wrong += client.decode(9, 200);
    done = true;
  });
  static constexpr const char* kSpecs[] = {
      "lru",      "slru:admit=second-miss", "arc", "s3fifo:admit=value", "sieve", "lfu:halve=64", "static",
      "wtinylfu", "ewma:admit=value"};
  int swaps = 0;
  while (!done) {
    auto set = daemon_->set_policy({}, kSpecs[static_cast<std::size_t>(swaps) % std::size(kSpecs)]);
    ASSERT_TRUE(set) << set.error().text;
    ++swaps;
  }
  decoder.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(swaps, 1);
  EXPECT_FALSE(daemon_->set_policy({}, "no-such-policy"));
}

// Of three layers one after the other is concentrated, and has slots for the others then.
class TradeTest : public ClientDaemonTest {
 protected:
  static constexpr std::uint32_t kSlots = 12, kLanes = 2;
  struct Seen {
    std::uint64_t n_trades = 0, n_slots_fewest = kSlots, n_slots_most = kSlots, fallback = 0;
    std::size_t wrong = 0;
  };
  // Each phase is as long as those before it together, so that what was learnt in them is outweighed.
  static std::size_t decode(Client& client, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::size_t wrong = 0;
    std::uint32_t n_tokens = 0;
    for (std::uint32_t phase = 0; phase < 5; ++phase) {
      for (const std::uint32_t end = 2 * n_tokens + 120; n_tokens < end; ++n_tokens) {
        for (std::uint32_t layer = 0; layer < 3; ++layer) {
          std::int32_t ids[kTopK], slots[kTopK];
          const std::uint32_t n_used = layer == phase % 3 ? kTopK : kExperts;
          for (auto& id : ids) id = static_cast<std::int32_t>(random() % n_used);
          const auto status = moecached_lane_resolve(client.lane(), layer, ids, 1, kTopK, 0, slots);
          EXPECT_EQ(status, MOECACHED_OK) << moecached_last_error();
          if (status != MOECACHED_OK) return wrong + 1;
          for (std::size_t k = 0; k < kTopK; ++k) wrong += client.wrong_bytes(layer, ids[k], slots[k]);
        }
        moecached_lane_end(client.lane());
      }
    }
    return wrong;
  }
  Seen run() {
    Seen seen;
    std::atomic<std::uint32_t> n_done = 0;
    std::atomic<std::size_t> wrong = 0;
    std::atomic<std::uint64_t> fallback = 0;
    std::vector<std::thread> threads;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([&, lane] {
        Client client(folder_, model_);
        wrong += decode(client, lane + 1);
        fallback += client.counters().fallback_reads;
        ++n_done;
      });
    }
    std::vector<std::uint32_t> before(3, kSlots);
    while (n_done < kLanes) {
      std::this_thread::yield();
      const std::vector<ModelReport> models = daemon_->models();
      if (models.empty()) continue;
      EXPECT_LE(models[0].pool_bytes_backed, models[0].pool_bytes);
      std::vector<std::uint32_t> now;
      for (const LayerReport& layer : models[0].layers) {
        now.push_back(layer.n_slots);
        seen.n_slots_fewest = std::min<std::uint64_t>(seen.n_slots_fewest, layer.n_slots);
        seen.n_slots_most = std::max<std::uint64_t>(seen.n_slots_most, layer.n_slots);
      }
      const std::uint32_t sum = now[0] + now[1] + now[2];
      EXPECT_LE(sum, 3 * kSlots);
      EXPECT_GE(sum, 3 * kSlots - 3) << "at most one of each layer is being emptied";
      if (now != before) ++seen.n_trades;
      before = now;
    }
    for (auto& thread : threads) thread.join();
    seen.wrong = wrong;
    seen.fallback = fallback;
    return seen;
  }
};

TEST_F(TradeTest, BytesAndMemoryAreRightWhileLayersTradeSlots) {
  daemon_.reset();
  start({.kind = SlotsSpec::Kind::kCount, .value = kSlots});
  const Seen seen = run();
  EXPECT_EQ(seen.wrong, 0u);
  EXPECT_EQ(seen.fallback, 0u);
  EXPECT_GE(seen.n_trades, 6u);
  EXPECT_EQ(seen.n_slots_fewest, 2 * kTopK) << "what two tokens need";
  EXPECT_GT(seen.n_slots_most, kSlots);
  const std::vector<ModelReport> models = daemon_->models();
  ASSERT_EQ(models.size(), 1u);
  EXPECT_LE(models[0].pool_bytes_backed, models[0].pool_bytes);
  EXPECT_EQ(models[0].pool_bytes, daemon_->status().pool_bytes_reserved);

  // A change of policy keeps the layers' slots.
  std::vector<std::uint32_t> slots;
  for (const LayerReport& layer : models[0].layers) slots.push_back(layer.n_slots);
  ASSERT_TRUE(daemon_->set_policy({}, "ewma"));
  for (std::size_t l = 0; l < slots.size(); ++l) EXPECT_EQ(daemon_->models()[0].layers[l].n_slots, slots[l]);
}

TEST_F(TradeTest, OfScopeLayerEachKeepsItsOwn) {
  daemon_.reset();
  start({.kind = SlotsSpec::Kind::kCount, .value = kSlots}, SlotScope::kLayer);
  const Seen seen = run();
  EXPECT_EQ(seen.wrong, 0u);
  EXPECT_EQ(seen.n_trades, 0u);
}

TEST_F(ClientDaemonTest, StreamedPartsAreThoseOfTheFile) {
  Client client(folder_, model_);
  for (std::uint32_t part = 0; part < 3; ++part) {
    moecached_part_info info{};
    ASSERT_EQ(moecached_model_part(client.model(), 1, part, &info), MOECACHED_OK);
    const std::size_t n = std::min<std::size_t>(kExperts, moecached_stream_capacity(client.lane(), 1, part));
    std::vector<std::int32_t> experts(n);
    for (std::size_t i = 0; i < n; ++i) experts[i] = static_cast<std::int32_t>(n - 1 - i);
    for (std::uint32_t half = 0; half < 2; ++half) {
      ASSERT_EQ(moecached_stream_begin(client.lane(), 1, part, experts.data(), n, half), MOECACHED_OK)
          << moecached_last_error();
      const void* data = nullptr;
      ASSERT_EQ(moecached_stream_wait(client.lane(), half, &data), MOECACHED_OK) << moecached_last_error();
      std::vector<std::byte> expected(info.expert_bytes);
      for (std::size_t i = 0; i < n; ++i) {
        test::fill_tensor_bytes(info.name, static_cast<std::uint64_t>(experts[i]) * info.expert_bytes,
                                expected);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                               static_cast<const std::byte*>(data) + i * info.expert_bytes));
      }
    }
  }
  EXPECT_EQ(client.counters().fallback_reads, 0u);
}

TEST_F(ClientDaemonTest, SecondSessionReadsNothingThatIsResident) {
  std::int32_t ids[kTopK] = {0, 1, 2, 3}, slots[kTopK];
  Client first(folder_, model_);
  ASSERT_EQ(moecached_lane_resolve(first.lane(), 0, ids, 1, kTopK, 0, slots), MOECACHED_OK);
  moecached_lane_end(first.lane());
  const auto before = daemon_->models().front().bytes_read;
  Client second(folder_, model_);
  ASSERT_EQ(moecached_lane_resolve(second.lane(), 0, ids, 1, kTopK, 0, slots), MOECACHED_OK);
  EXPECT_EQ(second.counters().leases, 0u);
  EXPECT_EQ(daemon_->models().front().bytes_read, before);
  EXPECT_EQ(daemon_->models().size(), 1u);
}

TEST_F(ClientDaemonTest, ModelThatIsNotAGgufIsRefusedAndTheSessionGoesOn) {
  const auto bad = folder_ / "bad.gguf";
  std::ofstream(bad) << "this is not a model, but it is longer than a header";
  Client good(folder_, model_);
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "bad", &session), MOECACHED_OK);
  const char* path = bad.c_str();
  moecached_model* model = nullptr;
  EXPECT_EQ(moecached_model_open(session, &path, 1, &model), MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()), "");
  path = model_.c_str();
  EXPECT_EQ(moecached_model_open(session, &path, 1, &model), MOECACHED_OK) << moecached_last_error();
  moecached_model_close(model);
  moecached_session_close(session);
  EXPECT_EQ(good.decode(3, 10), 0u);
}

TEST_F(ClientDaemonTest, FileChangedInUseStopsItsClientsAndNothingElse) {
  const auto other = folder_ / "other.gguf";
  test::write_file(
      other, test::make_moe({.n_layers = 1, .n_experts = kExperts, .n_expert_used = kTopK}).build().bytes);
  Client victim(folder_, model_), bystander(folder_, other);
  std::int32_t ids[kTopK] = {0, 1, 2, 3}, slots[kTopK];
  ASSERT_EQ(moecached_lane_resolve(victim.lane(), 0, ids, 1, kTopK, 0, slots), MOECACHED_OK);
  std::ofstream(model_, std::ios::app) << "more";
  std::int32_t others[kTopK] = {8, 9, 10, 11};
  EXPECT_EQ(moecached_lane_resolve(victim.lane(), 0, others, 1, kTopK, 0, slots), MOECACHED_E_MODEL_CHANGED);
  EXPECT_NE(std::string(moecached_last_error()).find("changed"), std::string::npos) << moecached_last_error();
  EXPECT_EQ(bystander.decode(5, 20), 0u);
  const auto models = daemon_->models();
  EXPECT_EQ(std::ranges::count_if(models, [](const ModelReport& m) { return m.changed_on_disk; }), 1);
}

TEST_F(ClientDaemonTest, RestartedDaemonIsTakenUpWithAnotherPoolSize) {
  Client client(folder_, model_);
  EXPECT_EQ(client.decode(1, 20), 0u);
  daemon_.reset();
  EXPECT_EQ(client.decode(2, 20), 0u);
  EXPECT_GT(client.counters().fallback_reads, 0u);
  start({.kind = SlotsSpec::Kind::kCount, .value = 9});
  const auto generation = moecached_model_generation(client.model());
  while (moecached_session_reconnect(client.session()) != MOECACHED_OK) std::this_thread::yield();
  moecached_layer_info info{};
  ASSERT_EQ(moecached_model_layer(client.model(), 0, &info), MOECACHED_OK);
  EXPECT_EQ(info.n_slots, 9u);
  EXPECT_NE(moecached_model_generation(client.model()), generation);
  const auto fallback = client.counters().fallback_reads;
  EXPECT_EQ(client.decode(3, 20), 0u);
  EXPECT_EQ(client.counters().fallback_reads, fallback);
  EXPECT_EQ(client.counters().reconnects, 1u);
}

TEST_F(ClientDaemonTest, LaneThatStallsInItsEpochKeepsItsExpertsAndHoldsUpNobody) {
  Client stalled(folder_, model_), other(folder_, model_);
  std::int32_t ids[2] = {1, 2}, slots[2];
  // Leased first, which would pin them; then a plain hit, of which the daemon learns from a record only.
  for (const std::uint32_t layer : {2u, 1u, 2u}) {
    ASSERT_EQ(moecached_lane_resolve(stalled.lane(), layer, ids, 1, 2, 0, slots), MOECACHED_OK);
  }
  ASSERT_EQ(stalled.counters().leases, 2u);
  // The lane stays in its epoch of layer 2 while another client turns the whole pool over.
  EXPECT_EQ(other.decode(4, 60), 0u);
  EXPECT_EQ(other.counters().fallback_reads, 0u);
  EXPECT_EQ(stalled.wrong_bytes(2, ids[0], slots[0]), 0u);
  EXPECT_EQ(stalled.wrong_bytes(2, ids[1], slots[1]), 0u);
  const auto sessions = daemon_->sessions();
  EXPECT_EQ(std::ranges::count_if(sessions, [](const SessionReport& s) { return s.stalled; }), 1);
  moecached_lane_end(stalled.lane());
  EXPECT_EQ(stalled.decode(5, 20), 0u);
}

// As a draft model beside its main one: another model's layer of the same index is nobody's business.
TEST_F(ClientDaemonTest, LaneThatStallsKeepsNothingOfAnotherModelOfItsSession) {
  const auto small = folder_ / "small.gguf";
  test::write_file(small, test::make_moe({.n_layers = 1, .n_experts = 4, .n_expert_used = 2}).build().bytes);
  Client stalled(folder_, model_), other(folder_, model_);
  const char* path = small.c_str();
  moecached_model* model = nullptr;
  moecached_lane* lane = nullptr;
  ASSERT_EQ(moecached_model_open(stalled.session(), &path, 1, &model), MOECACHED_OK)
      << moecached_last_error();
  ASSERT_EQ(moecached_lane_open(model, &lane), MOECACHED_OK) << moecached_last_error();
  std::int32_t ids[2] = {1, 2}, slots[2];
  ASSERT_EQ(moecached_lane_resolve(lane, 0, ids, 1, 2, 0, slots), MOECACHED_OK);
  EXPECT_EQ(other.decode(8, 60), 0u);
  EXPECT_EQ(other.counters().fallback_reads, 0u);
  EXPECT_TRUE(std::ranges::none_of(daemon_->sessions(), [](const SessionReport& s) { return s.stalled; }))
      << "nobody waited for it";
  moecached_lane_close(lane);
  moecached_model_close(model);
}

TEST_F(ClientDaemonTest, LaneThatStallsInItsLeaseLeavesTheOthersToStreaming) {
  Client stalled(folder_, model_), other(folder_, model_);
  std::int32_t held[4] = {1, 2, 3, 4}, wanted[4] = {5, 6, 7, 8}, slots[4];
  ASSERT_EQ(moecached_lane_resolve(stalled.lane(), 2, held, 1, 4, 0, slots), MOECACHED_OK);
  // It stays in the epoch of its lease, with four of six slots.
  EXPECT_EQ(moecached_lane_resolve(other.lane(), 2, wanted, 1, 4, 0, slots), MOECACHED_E_TOO_MANY);
  EXPECT_EQ(moecached_lane_resolve(other.lane(), 2, wanted, 1, 2, 0, slots), MOECACHED_OK);
  EXPECT_EQ(other.wrong_bytes(2, wanted[0], slots[0]), 0u);
  ASSERT_EQ(moecached_lane_resolve_resident(other.lane(), 2, wanted, 4, slots), MOECACHED_OK);
  EXPECT_GE(slots[0], 0);
  EXPECT_EQ(slots[2], -1);
  ASSERT_EQ(moecached_stream_begin(other.lane(), 2, 0, &wanted[2], 2, 0), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(other.lane(), 0, &data), MOECACHED_OK) << moecached_last_error();
  moecached_part_info part{};
  ASSERT_EQ(moecached_model_part(other.model(), 2, 0, &part), MOECACHED_OK);
  std::vector<std::byte> expected(part.expert_bytes);
  test::fill_tensor_bytes(part.name, 7 * part.expert_bytes, expected);
  EXPECT_EQ(std::memcmp(data, expected.data(), expected.size()), 0);
  EXPECT_EQ(other.counters().fallback_reads, 0u);
  // When it goes on, everybody has room again.
  moecached_lane_end(stalled.lane());
  EXPECT_EQ(stalled.decode(6, 20), 0u);
  EXPECT_EQ(moecached_lane_resolve(other.lane(), 2, wanted, 1, 4, 0, slots), MOECACHED_OK);
  EXPECT_EQ(other.counters().fallback_reads, 0u);
}

TEST_F(ClientDaemonTest, UnusedModelMakesRoomAndUsedOneDoesNot) {
  EXPECT_FALSE(daemon_->drop_model(1));
  {
    Client client(folder_, model_);
    EXPECT_FALSE(daemon_->drop_model(daemon_->models().front().id));
  }
  // The session ends when the daemon has seen its socket close.
  while (daemon_->models().front().sessions > 0) std::this_thread::yield();
  EXPECT_TRUE(daemon_->drop_model(daemon_->models().front().id));
  EXPECT_TRUE(daemon_->models().empty());
}

}  // namespace
}  // namespace moecached
