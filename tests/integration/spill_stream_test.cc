// What prompts stream, and what is read ahead for them, against the real daemon.
#include "tests/integration/spill_fixture.h"

namespace moecached {
namespace {

// Waves of a few experts, of sizes and places that are multiples of nothing, read slowly.
class SpillStreamTest : public SpillDaemonTest {
 protected:
  [[nodiscard]] test::MoeSpec spec() const override {
    return {.n_layers = kLayers,
            .n_experts = kExperts,
            .n_expert_used = kTopK,
            .n_embd = 288,
            .n_ff = 96,
            .up_type = 2,    // q4_0
            .down_type = 1,  // f16
            .biases = true};
  }
  void adjust(Config& config) const override {
    config.stream_bytes = 256u << 10;
    config.ssd = ssd_;
  }
  void read_slowly() {
    ssd_.engine = SsdEngine::kPread;
    ssd_.queue_depth = 1;
    ssd_.max_read_bytes = 4096;
  }
  static std::vector<std::int32_t> all() {
    std::vector<std::int32_t> out;
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) out.push_back(e);
    return out;
  }
  static std::uint32_t parts_of(SpillClient& client, std::uint32_t layer) {
    moecached_layer_info info{};
    EXPECT_EQ(moecached_model_layer(client.model(), layer, &info), MOECACHED_OK);
    return info.n_parts;
  }
  static moecached_counters counters_of(SpillClient& client) {
    moecached_counters counters{};
    moecached_model_counters(client.model(), &counters);
    return counters;
  }
  SsdOptions ssd_;
};

TEST_F(SpillStreamTest, NeighboursAndScatteredExpertsLandWhereTheFileHasThem) {
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(1);
  std::size_t wrong = 0;
  for (std::uint32_t round = 0; round < 200; ++round) {
    std::vector<std::int32_t> experts;
    const std::uint32_t of_eight = 1 + random() % 8;
    for (const std::int32_t e : all()) {
      if (random() % 8 < of_eight) experts.push_back(e);
    }
    if (round % 3 == 0) std::ranges::shuffle(experts, random);
    if (!experts.empty())
      wrong += client.whole(static_cast<std::uint32_t>(random() % kLayers), experts).wrong;
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(counters_of(client).fallback_reads, 0u);
  EXPECT_GT(report().streamed_bytes, 0u);
}

TEST_F(SpillStreamTest, APromptReadsEachPartOnceThoughItReadsAheadOverPartsAndLayers) {
  start_spill();
  SpillClient client(folder_, model_);
  for (std::uint64_t prompt = 1; prompt <= 3; ++prompt) {
    std::uint64_t parts = 0;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(client.whole(layer, all()).wrong, 0u);
      parts += parts_of(client, layer);
    }
    const moecached_counters counters = counters_of(client);
    EXPECT_EQ(counters.streamed_experts, prompt * parts * kExperts);
    EXPECT_EQ(counters.lookups, prompt * kLayers * kExperts);
    EXPECT_EQ(counters.hits, 0u);
    EXPECT_EQ(report().streamed_parts, counters.streamed_experts);
  }
}

TEST_F(SpillStreamTest, WhatWasReadAheadForALayerThatDoesNotComeIsNotTakenForAnother) {
  read_slowly();
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(2);
  std::size_t wrong = 0, lookups = 0;
  const auto whole = [&](std::uint32_t layer, const std::vector<std::int32_t>& experts) {
    lookups += experts.size();
    wrong += client.whole(layer, experts).wrong;
  };
  for (int round = 0; round < 4; ++round) {
    whole(0, all());
    whole(2, {1, 3, 4, 9});  // layer 1 was read ahead for
    whole(1, all());
    whole(2, {0, 15});  // few of those that were read ahead
    whole(0, all());
    wrong += client.token(random, 0).wrong;  // decode takes the place of the next layer
    whole(1, all());
    whole(1, {5, 7});  // the same again
  }
  EXPECT_EQ(wrong, 0u);
  const moecached_counters counters = counters_of(client);
  EXPECT_EQ(counters.lookups, lookups + 4 * kLayers * kTopK) << "what nobody asked for is no lookup";
  EXPECT_EQ(counters.fallback_reads, 0u);
  const LayerReport counted = sum();
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
}

TEST_F(SpillStreamTest, AGuessThatWasWrongIsNotRepeated) {
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(3);
  std::uint64_t read = 0;
  for (int prompt = 0; prompt < 5; ++prompt) {
    const std::uint64_t before = counters_of(client).streamed_experts;
    EXPECT_EQ(client.whole(0, all()).wrong, 0u);
    EXPECT_EQ(client.resolve(1, {0, 1, 2, 3}).wrong,
              0u);  // as the last layer of a prompt, which computes one row
    moecached_spill_end(client.lane());
    if (prompt == 2) read = counters_of(client).streamed_experts - before;
  }
  EXPECT_EQ(read, parts_of(client, 0) * kExperts);
}

TEST_F(SpillStreamTest, NoPartIsLoadedOfALayerThatHasNotBegun) {
  start_spill();
  SpillClient client(folder_, model_);
  std::vector<std::byte> memory(1u << 20);
  const auto load = [&] {
    return moecached_spill_load_part(client.lane(), 0, reinterpret_cast<std::uint64_t>(memory.data()),
                                     &memory);
  };
  EXPECT_EQ(load(), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(client.whole(0, {1, 2, 3}).wrong, 0u);
  const std::vector<std::int32_t> none = {60000}, twice = {4, 4};
  EXPECT_EQ(moecached_spill_begin_layer(client.lane(), 0, none.data(), 1), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(load(), MOECACHED_E_ARGUMENT) << "such an expert there is not";
  EXPECT_EQ(moecached_spill_begin_layer(client.lane(), 1, twice.data(), 2), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(load(), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_spill_begin_layer(client.lane(), 9999, twice.data(), 1), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(load(), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(client.whole(1, all()).wrong, 0u);
}

TEST_F(SpillStreamTest, ALaneIsClosedWithAWaveUnderWay) {
  read_slowly();
  start_spill();
  for (int round = 0; round < 5; ++round) {
    SpillClient client(folder_, model_);
    EXPECT_EQ(client.whole(static_cast<std::uint32_t>(round) % 2, all()).wrong, 0u);
  }
  SpillClient client(folder_, model_);
  moecached_spill_lane* lane = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &lane), MOECACHED_OK);
  const std::vector<std::int32_t> experts = all();
  ASSERT_EQ(moecached_spill_begin_layer(lane, 0, experts.data(), experts.size()), MOECACHED_OK);
  moecached_spill_lane_close(lane);
  EXPECT_EQ(client.whole(1, all()).wrong, 0u);
}

TEST_F(SpillStreamTest, TheDaemonDiesWhileAWaveIsUnderWay) {
  read_slowly();
  start_spill();
  SpillClient client(folder_, model_);
  EXPECT_EQ(client.whole(0, all()).wrong, 0u);
  const auto dies = [&](std::uint32_t part) {
    if (part == 1) daemon_.reset();
  };
  EXPECT_EQ(client.whole(1, all(), dies).wrong, 0u);
  EXPECT_EQ(client.whole(2, all()).wrong, 0u);
  EXPECT_GT(counters_of(client).fallback_reads, 0u);
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // a reconnect is tried that often
  ASSERT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  const std::uint64_t fallback = counters_of(client).fallback_reads;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_EQ(client.whole(layer, all()).wrong, 0u);
  EXPECT_EQ(counters_of(client).fallback_reads, fallback) << "the next daemon serves it";
  daemon_.reset();  // with what it has read ahead
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  ASSERT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(client.whole(2, all()).wrong, 0u);
}

TEST_F(SpillStreamTest, PromptsAndDecodeOfSeveralLanesShareTheSlots) {
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> wrong{0};
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([this, t, &wrong] {
      SpillClient client(folder_, model_);
      std::mt19937 random(t);
      for (std::uint32_t round = 0; round < 40; ++round) {
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
          std::vector<std::int32_t> experts = all();
          if (round % 4 == t) std::erase_if(experts, [&](std::int32_t) { return random() % 2 == 0; });
          if (!experts.empty()) wrong += client.whole(layer, experts).wrong;
        }
        wrong += client.tokens(t * 100 + round, 20, round).wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  const LayerReport counted = sum();
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
}

}  // namespace
}  // namespace moecached
