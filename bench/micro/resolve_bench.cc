// What a hit costs: nanoseconds per moecached_lane_resolve() of one token's experts, all of them resident.
//
//   resolve_bench [--socket PATH --model FILE [--model SHARD]...] [--experts 8] [--batches 100] [--json]
//
// Without --model it brings its own daemon (the fake one of the client tests): 48 layers of 128 experts, 32
// slots each, the shape of Qwen3-30B-A3B with tiny experts. Calls walk over the layers as a forward pass
// does. They come in batches of 480 with a pause between them, because no engine routes without computing and
// an endless loop would only measure a full ring. The figure is the median over the batches of a batch's time
// divided by its calls. Exit status: 0, or 2 on an error.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/include/moecached/moecached.h"
#ifdef MOECACHED_HAVE_FAKE_DAEMON
#include "tests/unit/client/fake_daemon.h"
#include "tests/unit/client/test_model.h"
#endif

namespace {

constexpr double kGoalNs = 200;
constexpr std::size_t kBatchCalls = 480;
constexpr auto kPause =
    std::chrono::milliseconds(25);  // longer than the daemon's tick: the ring is empty again

struct Options {
  const char* socket = nullptr;
  std::vector<const char*> models;
  std::size_t n_ids = 8;
  std::size_t n_batches = 100;
  bool json = false;
};

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "resolve_bench: %s\n", text.c_str());
  std::exit(2);
}

void check(moecached_status status, const char* what) {
  if (status != MOECACHED_OK) die(std::string(what) + ": " + moecached_last_error());
}

std::size_t number(const char* flag, const char* text) {
  char* end = nullptr;
  const unsigned long value = std::strtoul(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 1 || value > 100000)
    die(std::string(flag) + " takes a number from 1 to 100000");
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const char* flag = argv[i];
    if (std::strcmp(flag, "--json") == 0) {
      options.json = true;
      continue;
    }
    if (i + 1 == argc)
      die(std::string("usage: resolve_bench [--socket PATH --model FILE...] [--experts N] [--batches N] "
                      "[--json]; not understood: ") +
          flag);
    const char* value = argv[++i];
    if (std::strcmp(flag, "--socket") == 0) {
      options.socket = value;
    } else if (std::strcmp(flag, "--model") == 0) {
      options.models.push_back(value);
    } else if (std::strcmp(flag, "--experts") == 0) {
      options.n_ids = number(flag, value);
    } else if (std::strcmp(flag, "--batches") == 0) {
      options.n_batches = number(flag, value);
    } else {
      die(std::string("unknown option ") + flag);
    }
  }
  return options;
}

// One layer's routing: distinct experts that the first resolve made resident.
struct LayerCall {
  std::uint32_t layer;
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> slots;
};

moecached_status resolve(moecached_lane* lane, LayerCall& call) {
  return moecached_lane_resolve(lane, call.layer, call.ids.data(), 1, call.ids.size(),
                                call.ids.size() * sizeof(std::int32_t), call.slots.data());
}

std::vector<LayerCall> warm_up(moecached_model* model, moecached_lane* lane, std::size_t n_ids) {
  std::mt19937 random(1);
  std::vector<LayerCall> calls;
  for (std::uint32_t layer = 0; layer < moecached_model_layers(model); ++layer) {
    moecached_layer_info info{};
    check(moecached_model_layer(model, layer, &info), "layer");
    std::vector<std::int32_t> experts(info.n_experts);
    for (std::uint32_t i = 0; i < info.n_experts; ++i) experts[i] = static_cast<std::int32_t>(i);
    std::shuffle(experts.begin(), experts.end(), random);
    experts.resize(std::min<std::size_t>({n_ids, info.n_slots, info.n_experts}));
    LayerCall call{layer, experts, std::vector<std::int32_t>(experts.size())};
    check(resolve(lane, call), "warm-up");
    calls.push_back(std::move(call));
  }
  moecached_lane_end(lane);
  return calls;
}

double measure_batch(moecached_lane* lane, std::vector<LayerCall>& calls) {
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kBatchCalls; ++i) {
    if (resolve(lane, calls[i % calls.size()]) != MOECACHED_OK) die(moecached_last_error());
  }
  const auto end = std::chrono::steady_clock::now();
  moecached_lane_end(lane);
  return std::chrono::duration<double, std::nano>(end - start).count() / kBatchCalls;
}

}  // namespace

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  const char* kind = "a running daemon";
#ifdef MOECACHED_HAVE_FAKE_DAEMON
  namespace test = moecached::client::test;
  std::unique_ptr<test::ScratchFolder> folder;
  std::unique_ptr<test::TestModel> file;
  std::unique_ptr<test::FakeDaemon> daemon;
  std::string socket;
  if (options.models.empty()) {
    kind = "the test daemon";
    folder = std::make_unique<test::ScratchFolder>();
    socket = folder->path("handle.sock");
    file = std::make_unique<test::TestModel>(test::TestModel::Shape{.n_layers = 48,
                                                                    .n_experts = 128,
                                                                    .n_slots = 32,
                                                                    .n_expert_used = 8,
                                                                    .n_files = 1,
                                                                    .part_bytes = {64, 64, 64},
                                                                    .stream_half_bytes = 8192});
    test::FakeOptions behaviour;
    behaviour.tick_ms = 20;  // as the real one while records flow
    daemon = std::make_unique<test::FakeDaemon>(socket, *file, behaviour);
    options.socket = socket.c_str();
    options.models = {file->paths()[0].c_str()};
  }
#endif
  if (options.models.empty()) die("--model FILE is needed: this build has no daemon of its own");

  moecached_session* session = nullptr;
  moecached_model* model = nullptr;
  moecached_lane* lane = nullptr;
  check(moecached_session_open(options.socket, "resolve_bench", &session), "session");
  check(moecached_model_open(session, options.models.data(), options.models.size(), &model), "model");
  check(moecached_lane_open(model, &lane), "lane");
  std::vector<LayerCall> calls = warm_up(model, lane, options.n_ids);

  moecached_counters before{};
  moecached_model_counters(model, &before);
  std::vector<double> batches;
  for (std::size_t i = 0; i < options.n_batches; ++i) {
    std::this_thread::sleep_for(kPause);
    batches.push_back(measure_batch(lane, calls));
  }
  moecached_counters after{};
  moecached_model_counters(model, &after);
  if (after.leases != before.leases || after.fallback_reads != before.fallback_reads) {
    die("some experts were not resident, so this measured misses as well: use a pool with more slots, or an "
        "idle daemon");
  }

  std::sort(batches.begin(), batches.end());
  const double median = batches[batches.size() / 2];
  const double best = batches.front();
  const double p90 = batches[batches.size() * 9 / 10];
  const bool met = median <= kGoalNs;
  const unsigned long long dropped = after.dropped_records - before.dropped_records;
  if (options.json) {
    std::printf(
        "{\"name\": \"resolve_resident_ns\", \"value\": %.1f, \"goal\": %.0f, \"met\": %s, \"unit\": \"ns\", "
        "\"best\": %.1f, "
        "\"p90\": %.1f, \"experts\": %zu, \"layers\": %zu, \"dropped_records\": %llu, \"daemon\": \"%s\"}\n",
        median, kGoalNs, met ? "true" : "false", best, p90, options.n_ids, calls.size(), dropped, kind);
  } else {
    std::printf(
        "resolve of %zu resident experts, %zu layers, %s: median %.1f ns (best batch %.1f, 90 %% below "
        "%.1f), goal %.0f: "
        "%s; %llu records dropped\n",
        options.n_ids, calls.size(), kind, median, best, p90, kGoalNs, met ? "met" : "not met", dropped);
  }
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
  return 0;
}
