#include "bench/replay/replayer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "bench/replay/belady.h"
#include "daemon/policy/registry.h"
#include "tests/unit/replay/traces.h"

namespace moecached::replay {
namespace {

using testing::HasSubstr;

struct Counts {
  std::uint64_t lookups = 0, hits = 0, insertions = 0, evictions = 0;
  bool operator==(const Counts&) const = default;
};

// LRU in the plainest way: a list a layer, last step first. Experts of one step go by their index.
Counts plain_lru(const Trace& trace, std::span<const Turn> order, std::uint32_t layer,
                 std::uint32_t n_slots) {
  struct Entry {
    std::uint64_t step;
    std::uint16_t id;
    auto operator<=>(const Entry&) const = default;
  };
  std::vector<Entry> residents;
  Counts counts;
  std::uint64_t step = 0;
  for (const Turn& turn : order) {
    const auto event = trace.event(turn.row, layer);
    if (event.empty()) continue;
    ++step;
    counts.lookups += event.size();
    std::vector<std::uint16_t> missing;
    for (const std::uint16_t id : event) {
      const auto found = std::ranges::find(residents, id, &Entry::id);
      if (found == residents.end()) {
        missing.push_back(id);
      } else {
        ++counts.hits;
        found->step = step;
      }
    }
    if (event.size() > n_slots) continue;
    std::ranges::sort(residents);
    for (std::size_t n = residents.size() + missing.size(); n > n_slots; --n) {
      residents.erase(residents.begin());  // never one of the event: there are others, and they are older
      ++counts.evictions;
    }
    for (const std::uint16_t id : missing) residents.push_back({step, id});
    counts.insertions += missing.size();
  }
  return counts;
}

void expect_lru(const Trace& trace, std::uint32_t n_slots) {
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  const std::uint32_t n_layers = trace.header().n_layers;
  const auto result = replay(
      trace, *order, {.mode = Mode::kPool, .policy = "lru", .n_slots = std::vector(n_layers, n_slots)});
  ASSERT_TRUE(result) << result.error().text;
  for (std::uint32_t layer = 0; layer < n_layers; ++layer) {
    const LayerCounters& c = result->layers[layer];
    EXPECT_EQ((Counts{c.lookups, c.hits, c.insertions, c.evictions}),
              plain_lru(trace, *order, layer, n_slots))
        << "layer " << layer << ", " << n_slots << " slots";
  }
}

TEST(Replayer, CountsAsPlainLruDoes) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    expect_lru(
        make_trace({.n_layers = 3, .n_experts = 12, .k = 3, .n_rows = 400, .seed = seed, .prefill_every = 0}),
        2 + seed % 8);
  }
}

TEST(Replayer, CountsAsPlainLruDoesOnARealTrace) {
  const Result<Trace> trace = Trace::read(MOECACHED_TEST_DATA "/gpt-oss-20b_k4_24seq.csv.zst", {});
  ASSERT_TRUE(trace) << trace.error().text;
  for (const std::uint32_t n_slots : {4u, 8u, 16u}) expect_lru(*trace, n_slots);
}

TEST(Replayer, PrefetchesWhatARealTraceUsesNext) {
  const Result<Trace> trace = Trace::read(MOECACHED_TEST_DATA "/gpt-oss-20b_k4_24seq.csv.zst", {});
  ASSERT_TRUE(trace) << trace.error().text;
  const auto order = interleave(*trace, 1);
  ASSERT_TRUE(order);
  ReplayOptions options{.policy = "slru", .n_slots = std::vector<std::uint32_t>(24, 8)};
  const auto without = replay(*trace, *order, options);
  options.prefetch = true;
  const auto with = replay(*trace, *order, options);
  ASSERT_TRUE(without && with);
  LayerCounters sum;
  for (const LayerCounters& layer : with->layers) {
    sum.prefetched += layer.prefetched;
    sum.prefetch_used += layer.prefetch_used;
  }
  EXPECT_EQ(without->prefetch, PrefetchState::kOff);
  EXPECT_EQ(with->prefetch, PrefetchState::kOn);
  // A quarter of the misses, three reads of four for something.
  EXPECT_LT(with->total().misses(), without->total().misses() * 3 / 4);
  EXPECT_GT(sum.prefetch_used, sum.prefetched * 7 / 10);
  EXPECT_EQ(with->total().insertions, with->total().misses() + sum.prefetched) << "each is read once";
}

class EveryPolicy : public testing::TestWithParam<std::string_view> {};

TEST_P(EveryPolicy, NeverBeatsTheOneThatKnowsTheFuture) {
  const Trace trace =
      make_trace({.n_layers = 2, .n_experts = 16, .k = 2, .n_rows = 3000, .seed = 5, .prefill_every = 0});
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  for (const std::uint32_t n : {2u, 5u, 12u, 16u}) {
    const std::vector<std::uint32_t> n_slots(2, n);
    const Tally best = replay_belady(trace, *order, {.bypass = false, .n_slots = n_slots}).total();
    const Tally bypass = replay_belady(trace, *order, {.bypass = true, .n_slots = n_slots}).total();
    const std::string policy(GetParam());
    const auto pool = replay(trace, *order, {.mode = Mode::kPool, .policy = policy, .n_slots = n_slots});
    const auto covered =
        replay(trace, *order, {.mode = Mode::kCovered, .policy = policy, .n_slots = n_slots});
    ASSERT_TRUE(pool && covered);
    EXPECT_LE(pool->total().hits, best.hits);
    EXPECT_LE(covered->total().hits, bypass.hits);
    EXPECT_GT(pool->total().hits, 0u);
    // What is loaded in mode pool are the misses, no more and no less.
    EXPECT_EQ(pool->total().insertions, pool->total().misses());
    EXPECT_LE(covered->total().insertions, covered->total().misses());
    EXPECT_EQ(link_experts(covered->total(), Mode::kCovered),
              covered->total().misses() + covered->total().insertions);
    EXPECT_EQ(pool->decode.rows, 3000u);
    EXPECT_EQ(pool->decode.lookups, best.lookups);
  }
}

TEST_P(EveryPolicy, CountsPromptsApartAndTeachesThemNothing) {
  const RandomTrace shape{.n_layers = 1, .n_experts = 16, .k = 2, .n_rows = 900, .seed = 6};
  const Trace mixed = make_trace(shape);
  const auto order = interleave(mixed, 1);
  ASSERT_TRUE(order);
  const auto result =
      replay(mixed, *order, {.mode = Mode::kPool, .policy = std::string(GetParam()), .n_slots = {4}});
  ASSERT_TRUE(result);
  EXPECT_EQ(result->prefill.rows, 225u);
  EXPECT_EQ(result->decode.rows, 675u);
  EXPECT_LT(result->prefill.insertions, result->prefill.misses())
      << "what decode uses is not given up for them";
  EXPECT_EQ(result->decode.insertions, result->decode.misses());
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryPolicy, testing::ValuesIn(policy_names()),
                         [](const auto& policy) { return std::string(policy.param); });

TEST(Replayer, OneUseIsNoReasonToUploadInCoveredMode) {
  TraceHeader header;
  header.n_layers = 1;
  header.n_experts = 64;
  header.k = header.n_used = 1;
  Trace trace(std::move(header));
  // 0 and 1 all the time; now and then another, once.
  for (std::uint16_t i = 0; i < 600; ++i) {
    const std::uint16_t id = i % 20 == 19 ? static_cast<std::uint16_t>(2 + i / 20) : i % 2;
    ASSERT_TRUE(trace.add({}, {&id, 1}));
  }
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  const auto ewma = replay(trace, *order, {.mode = Mode::kCovered, .policy = "ewma", .n_slots = {2}});
  const auto lru = replay(trace, *order, {.mode = Mode::kCovered, .policy = "lru", .n_slots = {2}});
  ASSERT_TRUE(ewma && lru);
  EXPECT_EQ(ewma->total().insertions, 2u);
  EXPECT_EQ(ewma->total().hits, 600u - 2 - 30);
  EXPECT_GT(lru->total().insertions, 60u);  // it says of every miss that it is worth it
}

TEST(Replayer, PrivatePoolsAreThoseOfTheirLanesAlone) {
  const Trace trace = make_trace({.n_layers = 2, .n_experts = 16, .k = 2, .n_rows = 900, .n_sequences = 3});
  const auto order = interleave(trace, 3);
  ASSERT_TRUE(order);
  const auto together =
      replay(trace, *order,
             {.mode = Mode::kPool, .policy = "slru", .n_slots = {4, 4}, .n_lanes = 3, .private_pools = true});
  ASSERT_TRUE(together);
  std::uint64_t hits = 0;
  for (std::uint32_t lane = 0; lane < 3; ++lane) {
    std::vector<Turn> own;
    for (const Turn& turn : *order) {
      if (turn.lane == lane) own.push_back({turn.row, 0});
    }
    const auto alone = replay(trace, own, {.mode = Mode::kPool, .policy = "slru", .n_slots = {4, 4}});
    ASSERT_TRUE(alone);
    hits += alone->total().hits;
  }
  EXPECT_EQ(together->total().hits, hits);
  const auto shared =
      replay(trace, *order, {.mode = Mode::kPool, .policy = "slru", .n_slots = {12, 12}, .n_lanes = 3});
  ASSERT_TRUE(shared);
  EXPECT_GT(shared->total().hits, hits);
}

ReplayResult replayed(const Trace& trace, const ReplayOptions& options) {
  const auto order = interleave(trace, options.n_lanes);
  EXPECT_TRUE(order);
  auto result = replay(trace, *order, options);
  EXPECT_TRUE(result) << result.error().text;
  return *std::move(result);
}

// The golden figures of slot trading: what it gains on a real trace, in both modes, is what it is for.
TEST(Replayer, LayersThatTradeSlotsHitMoreOnARealTrace) {
  const Result<Trace> trace = Trace::read(MOECACHED_TEST_DATA "/gpt-oss-20b_k4_24seq.csv.zst", {});
  ASSERT_TRUE(trace) << trace.error().text;
  for (const Mode mode : {Mode::kPool, Mode::kCovered}) {
    for (const char* policy : {"ewma", "slru", "lru"}) {
      ReplayOptions options{.mode = mode, .policy = policy, .n_slots = std::vector<std::uint32_t>(24, 16)};
      const ReplayResult layer = replayed(*trace, options);
      options.scope = SlotScope::kGlobal;
      const ReplayResult global = replayed(*trace, options);
      const auto points = [&](const ReplayResult& result) {
        return 100.0 * static_cast<double>(result.total().hits) / static_cast<double>(result.total().lookups);
      };
      EXPECT_GT(points(global), points(layer) + 0.5) << policy;
      EXPECT_EQ(std::accumulate(global.n_slots.begin(), global.n_slots.end(), 0u), 24u * 16u);
      EXPECT_EQ(std::accumulate(layer.n_slots.begin(), layer.n_slots.end(), 0u), 24u * 16u);
      EXPECT_GE(*std::ranges::min_element(global.n_slots), 8u) << "what two tokens need";
      EXPECT_NE(global.n_slots, layer.n_slots);
      const ReplayResult again = replayed(*trace, options);
      EXPECT_EQ(again.n_slots, global.n_slots);
      EXPECT_EQ(again.total().hits, global.total().hits);
    }
  }
}

TEST_P(EveryPolicy, TradesSlotsWithinThoseThatThereAre) {
  const Trace trace = make_trace({.n_layers = 4, .n_experts = 24, .k = 3, .n_rows = 3000, .n_sequences = 4});
  for (const Mode mode : {Mode::kPool, Mode::kCovered}) {
    for (const bool private_pools : {false, true}) {
      const ReplayOptions options{.mode = mode,
                                  .policy = std::string(GetParam()),
                                  .n_slots = {9, 12, 8, 20},
                                  .n_lanes = 2,
                                  .private_pools = private_pools,
                                  .scope = SlotScope::kGlobal};
      const ReplayResult result = replayed(trace, options);
      EXPECT_EQ(std::accumulate(result.n_slots.begin(), result.n_slots.end(), 0u), private_pools ? 98u : 49u);
      EXPECT_EQ(result.events_too_wide, 0u) << "a layer keeps what a token needs";
    }
  }
}

TEST(Replayer, UnknownPolicyIsAnErrorThatListsThem) {
  const Trace trace = make_trace({});
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  const auto result = replay(trace, *order, {.mode = Mode::kPool, .policy = "oracle", .n_slots = {2}});
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().text, HasSubstr("lru"));
}

TEST(Interleave, DealsSequencesAndTakesTurns) {
  const Trace trace = make_trace({.n_rows = 8, .n_sequences = 4});  // two rows each
  const auto order = interleave(trace, 2);
  ASSERT_TRUE(order);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> got;
  for (const Turn& turn : *order) got.emplace_back(turn.lane, turn.row);
  const std::vector<std::pair<std::uint32_t, std::uint32_t>> wanted = {{0, 0}, {1, 2}, {0, 1}, {1, 3},
                                                                       {0, 4}, {1, 6}, {0, 5}, {1, 7}};
  EXPECT_EQ(got, wanted);
  const auto too_many = interleave(trace, 5);
  ASSERT_FALSE(too_many);
  EXPECT_THAT(too_many.error().text, HasSubstr("4 sequence(s)"));
}

TEST(ReplayPeers, OneGpuCountsAsTheReplayOfItsPool) {
  const Trace trace = make_trace({.n_layers = 2, .n_experts = 16, .k = 3, .n_rows = 600, .seed = 3});
  const auto order = interleave(trace, 1);
  ASSERT_TRUE(order);
  const ReplayOptions options{.mode = Mode::kCovered, .policy = "ewma", .n_slots = {5, 5}};
  const auto pool = replay(trace, *order, options);
  const auto peers = replay_peers(trace, *order, options, 0.125);
  ASSERT_TRUE(pool && peers);
  EXPECT_EQ(peers->total.lookups, pool->total().lookups);
  EXPECT_EQ(peers->total.hits, pool->total().hits);
  EXPECT_EQ(peers->total.insertions, pool->total().insertions);
  EXPECT_EQ(peers->peer_hits + peers->copies, 0u);
}

TEST(ReplayPeers, MoreGpusHoldMoreExpertsAndAPeerThatIsAsSlowAsRamIsWorthNoCopyLess) {
  const Trace trace =
      make_trace({.n_layers = 2, .n_experts = 32, .k = 4, .n_rows = 4000, .n_sequences = 8, .seed = 4});
  double before = 0;
  for (const std::uint32_t n_gpus : {1u, 2u, 4u, 8u}) {
    const auto order = interleave(trace, n_gpus);
    ASSERT_TRUE(order) << order.error().text;
    const auto result =
        replay_peers(trace, *order,
                     {.mode = Mode::kCovered, .policy = "ewma", .n_slots = {4, 4}, .n_lanes = n_gpus}, 0.125);
    ASSERT_TRUE(result) << result.error().text;
    const double hits = static_cast<double>(result->total.hits) / static_cast<double>(result->total.lookups);
    EXPECT_GT(hits, before + 0.05) << n_gpus << " GPUs";
    EXPECT_EQ(result->n_slots, 8u * n_gpus);
    EXPECT_LE(result->copies, result->n_slots);
    before = hits;
  }
}

}  // namespace
}  // namespace moecached::replay
