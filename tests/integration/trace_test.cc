// A recording of the real client at the real daemon, replayed: the simulator counts what the daemon counted,
// layer by layer. Everything between is real: rings, core loop, gRPC, the file.
#include <gtest/gtest.h>
#include <moecached/moecached.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "bench/replay/belady.h"
#include "bench/replay/replayer.h"
#include "bench/replay/slot_choice.h"
#include "client/ctl/record.h"
#include "daemon/control/control_server.h"
#include "daemon/ipc/daemon.h"
#include "daemon/policy/registry.h"
#include "tests/support/gguf_builder.h"

namespace moecached {
namespace {

constexpr std::uint32_t kExperts = 32, kTopK = 4, kLayers = 3;
constexpr int kTokens = 400;
constexpr std::uint32_t kSlots = 12;

class TraceTest : public testing::TestWithParam<std::tuple<std::string_view, SlotScope>> {
 protected:
  static std::string_view policy() { return std::get<0>(GetParam()); }
  static SlotScope scope() { return std::get<1>(GetParam()); }
  void SetUp() override {
    char folder[] = "/tmp/moecached-trace-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_path_ = folder_ / "model.gguf";
    test::write_file(
        model_path_,
        test::make_moe({.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK}).build().bytes);
    start("off");
  }
  void start(const std::string& prefetch) {
    control_.reset();
    daemon_.reset();
    Config config;
    config.prefetch = prefetch;
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.pool_bytes = 64u << 20;
    config.slots = {.kind = SlotsSpec::Kind::kCount, .value = kSlots};
    config.policy = policy();
    config.slot_scope = scope();
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
    ControlServerOptions options;
    options.socket = config.control_socket;
    auto control = ControlServer::start(options, *daemon_);
    ASSERT_TRUE(control) << control.error().text;
    control_ = *std::move(control);
  }
  void TearDown() override {
    control_.reset();
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }

  // Until the daemon has taken up so many lookups and reads nothing any more.
  void settle(std::uint64_t lookups) {
    for (;;) {
      const ModelReport model = daemon_->models().front();
      std::uint64_t seen = 0;
      for (const LayerReport& layer : model.layers) seen += layer.lookups;
      if (seen >= lookups && model.coming == 0) return;
      std::this_thread::yield();
    }
  }

  // What `run` makes the daemon do, as moecachectl records it: the path of the trace.
  template <typename Run>
  std::string record(Run run) {
    std::string path = folder_ / "trace.csv.zst";
    std::atomic<int> code = -1;
    std::thread recorder([&] {
      ctl::ControlClient client(folder_ / "control.sock", std::chrono::seconds(10));
      code = ctl::record_trace(client, {.json = true}, {.path = path});
    });
    while (!recording_runs()) std::this_thread::yield();
    run();
    while (!daemon_->sessions().empty()) std::this_thread::yield();  // every record was taken up
    ctl::stop_recording();
    recorder.join();
    EXPECT_EQ(code, 0);
    return path;
  }

  // Skewed, sticky tokens, in the first layer over a quarter of the experts unless it settles; now and then a
  // batch, of which the daemon learns the union. settles: waits after each layer, and what a layer uses
  // follows from the one before.
  void decode(std::uint32_t seed, bool settles = false, int n_tokens = kTokens) {
    moecached_session* session = nullptr;
    moecached_model* model = nullptr;
    moecached_lane* lane = nullptr;
    ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "trace", &session), MOECACHED_OK)
        << moecached_last_error();
    const char* path = model_path_.c_str();
    ASSERT_EQ(moecached_model_open(session, &path, 1, &model), MOECACHED_OK) << moecached_last_error();
    ASSERT_EQ(moecached_lane_open(model, &lane), MOECACHED_OK) << moecached_last_error();
    std::mt19937 random(seed);
    std::int32_t ids[kLayers][2 * kTopK], slots[2 * kTopK];
    std::uint64_t lookups = 0;
    for (int token = 0; token < n_tokens; ++token) {
      const std::size_t rows = token % 50 == 7 ? 2 : 1;
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        for (std::size_t row = 0; row < rows; ++row) {
          std::int32_t* of_row = ids[layer] + row * kTopK;
          for (std::uint32_t k = 0; k < kTopK; ++k) {
            if (settles && layer > 0) {
              of_row[k] = (ids[layer - 1][row * kTopK + k] + 5) % static_cast<std::int32_t>(kExperts);
              continue;
            }
            const bool stays = token > 0 && rows == 1 && random() % 2 == 0;
            while (!stays) {
              const std::uint32_t n = layer == 0 && !settles ? kExperts / 4 : kExperts;
              of_row[k] = static_cast<std::int32_t>(std::min(random() % n, random() % n));
              if (std::find(of_row, of_row + k, of_row[k]) == of_row + k) break;
            }
          }
        }
        ASSERT_EQ(
            moecached_lane_resolve(lane, layer, ids[layer], rows, kTopK, kTopK * sizeof(std::int32_t), slots),
            MOECACHED_OK)
            << moecached_last_error();
        lookups += std::set<std::int32_t>(ids[layer], ids[layer] + rows * kTopK).size();
        if (settles) settle(lookups);
      }
      moecached_lane_end(lane);
    }
    moecached_lane_close(lane);
    moecached_model_close(model);
    moecached_session_close(session);
  }

  // The recorder makes its unnamed file when the daemon's first chunk has come.
  static bool recording_runs() {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      if (std::filesystem::read_symlink(entry.path(), error).string().ends_with(".rows (deleted)"))
        return true;
    }
    return false;
  }

  std::filesystem::path folder_, model_path_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<ControlServer> control_;
};

TEST_P(TraceTest, ReplayCountsWhatTheDaemonCounted) {
  ASSERT_TRUE(daemon_->register_model({model_path_}));
  const std::string path = record([&] {
    decode(1);
    decode(2);
  });

  const auto trace = replay::Trace::read(path, {});
  ASSERT_TRUE(trace) << trace.error().text;
  EXPECT_EQ(trace->header().dropped, 0u);
  EXPECT_EQ(trace->header().n_used, kTopK);
  EXPECT_EQ(trace->header().policy, policy());
  EXPECT_EQ(trace->size(), 2u * kTokens);
  EXPECT_EQ(trace->n_sequences(), 2u);
  const auto slots = replay::parse_slots("recorded", trace->header());
  ASSERT_TRUE(slots) << slots.error().text;
  const auto order = replay::interleave(*trace, 1);
  ASSERT_TRUE(order);
  const auto result = replay::replay(*trace, *order,
                                     {.mode = replay::Mode::kPool,
                                      .policy = trace->header().policy,
                                      .n_slots = slots->front().n_slots,
                                      .scope = scope()});
  ASSERT_TRUE(result) << result.error().text;
  const ModelReport model = daemon_->models().front();
  ASSERT_EQ(model.layers.size(), kLayers);
  std::uint64_t n_evictions = 0;
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    const LayerReport& daemon = model.layers[l];
    const LayerCounters& replayed = result->layers[l];
    EXPECT_GT(daemon.hits, 0u);
    n_evictions += daemon.evictions;
    EXPECT_EQ(replayed.lookups, daemon.lookups) << "layer " << l;
    EXPECT_EQ(replayed.hits, daemon.hits) << "layer " << l;
    EXPECT_EQ(replayed.misses, daemon.misses) << "layer " << l;
    EXPECT_EQ(replayed.insertions, daemon.insertions) << "layer " << l;
    EXPECT_EQ(replayed.evictions, daemon.evictions) << "layer " << l;
    EXPECT_EQ(replayed.leases, daemon.leases) << "layer " << l;
    EXPECT_EQ(result->n_slots[l], daemon.n_slots) << "layer " << l;
  }
  EXPECT_GT(n_evictions, 0u);
  EXPECT_EQ(model.layers[0].n_slots < kSlots, scope() == SlotScope::kGlobal) << "it can spare some";
  // And that equality could fail: with a slot less the counters are others.
  const auto other = replay::replay(*trace, *order,
                                    {.mode = replay::Mode::kPool,
                                     .policy = trace->header().policy,
                                     .n_slots = std::vector<std::uint32_t>(kLayers, kSlots - 1),
                                     .scope = scope()});
  ASSERT_TRUE(other);
  EXPECT_NE(other->layers[1].hits, model.layers[1].hits);
}

TEST_P(TraceTest, ChallengersCountWhatTheReplayCounts) {
  ASSERT_TRUE(daemon_->register_model({model_path_}));
  const std::vector<std::string> challengers = {"slru:probation=20", "ewma", "learned"};
  ASSERT_TRUE(daemon_->shadow_policies(0, challengers));
  const std::string path = record([&] { decode(3); });

  const auto compared = daemon_->compare_policies(0);
  ASSERT_TRUE(compared) << compared.error().text;
  EXPECT_EQ(compared->dropped, 0u);
  EXPECT_EQ(compared->forgotten, 0u);
  ASSERT_EQ(compared->policies.size(), 1 + challengers.size());
  const auto trace = replay::Trace::read(path, {});
  ASSERT_TRUE(trace) << trace.error().text;
  const auto order = replay::interleave(*trace, 1);
  ASSERT_TRUE(order);
  const std::vector<std::uint32_t> n_slots(kLayers, kSlots);
  for (std::size_t i = 0; i < challengers.size(); ++i) {
    const auto result = replay::replay(
        *trace, *order,
        {.mode = replay::Mode::kPool, .policy = challengers[i], .n_slots = n_slots, .scope = scope()});
    ASSERT_TRUE(result) << result.error().text;
    for (std::uint32_t l = 0; l < kLayers; ++l) {
      const PolicyScore& score = compared->layers[l].policies[i + 1];
      EXPECT_EQ(score.lookups, result->layers[l].lookups) << challengers[i] << ", layer " << l;
      EXPECT_EQ(score.hits, result->layers[l].hits) << challengers[i] << ", layer " << l;
      EXPECT_EQ(score.uploads, result->layers[l].insertions) << challengers[i] << ", layer " << l;
      EXPECT_EQ(score.window_hits, score.hits) << challengers[i] << ", layer " << l;
      EXPECT_GT(score.hits, 0u);
    }
  }
  // The live policy by its own counters, and who knows the future by the replay's.
  const ModelReport model = daemon_->models().front();
  std::uint64_t best = 0;
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    EXPECT_EQ(compared->layers[l].policies[0].hits, model.layers[l].hits);
    EXPECT_EQ(compared->layers[l].policies[0].window_hits, model.layers[l].hits);
    EXPECT_EQ(compared->layers[l].window_lookups, model.layers[l].lookups);
    best += compared->layers[l].belady_hits;
  }
  EXPECT_EQ(best, replay::replay_belady(*trace, *order, {.bypass = true, .n_slots = n_slots}).total().hits);

  ASSERT_TRUE(daemon_->shadow_policies(0, {}));
  EXPECT_FALSE(daemon_->compare_policies(0));
}

// A replay's reads take no time, so the client gives the daemon time for its own.
TEST_P(TraceTest, ReplayPrefetchesWhatTheDaemonPrefetched) {
  start("auto");
  ASSERT_TRUE(daemon_->register_model({model_path_}));
  const std::string path = record([&] { decode(4, true, 700); });

  const auto trace = replay::Trace::read(path, {});
  ASSERT_TRUE(trace) << trace.error().text;
  const auto order = replay::interleave(*trace, 1);
  ASSERT_TRUE(order);
  replay::ReplayOptions options{.mode = replay::Mode::kPool,
                                .policy = std::string(std::get<0>(GetParam())),
                                .n_slots = std::vector<std::uint32_t>(kLayers, kSlots),
                                .scope = std::get<1>(GetParam()),
                                .prefetch = true};
  const auto with = replay::replay(*trace, *order, options);
  options.prefetch = false;
  const auto without = replay::replay(*trace, *order, options);
  ASSERT_TRUE(with && without);
  const ModelReport model = daemon_->models().front();
  std::uint64_t used = 0, more_hits = 0;
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    const LayerReport& daemon = model.layers[l];
    const LayerCounters& replayed = with->layers[l];
    EXPECT_EQ(replayed.lookups, daemon.lookups) << "layer " << l;
    EXPECT_EQ(replayed.hits, daemon.hits) << "layer " << l;
    EXPECT_EQ(replayed.insertions, daemon.insertions) << "layer " << l;
    EXPECT_EQ(replayed.evictions, daemon.evictions) << "layer " << l;
    EXPECT_EQ(replayed.leases, daemon.leases) << "layer " << l;
    EXPECT_EQ(replayed.prefetched, daemon.prefetched) << "layer " << l;
    EXPECT_EQ(replayed.prefetch_used, daemon.prefetch_used) << "layer " << l;
    EXPECT_EQ(replayed.prefetch_wasted, daemon.prefetch_wasted) << "layer " << l;
    EXPECT_EQ(replayed.prefetch_regretted, daemon.prefetch_regretted) << "layer " << l;
    EXPECT_EQ(daemon.prefetch_late, 0u);
    used += daemon.prefetch_used;
    more_hits += with->layers[l].hits - without->layers[l].hits;
  }
  EXPECT_EQ(model.prefetch, name_of(with->prefetch));
  EXPECT_GT(used, 50u);
  EXPECT_GT(more_hits, used / 2);
}

INSTANTIATE_TEST_SUITE_P(Registry, TraceTest,
                         testing::Combine(testing::ValuesIn(policy_names()),
                                          testing::Values(SlotScope::kLayer, SlotScope::kGlobal)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param)) +
                                  (std::get<1>(each.param) == SlotScope::kLayer ? "_layer" : "_global");
                         });

}  // namespace
}  // namespace moecached
