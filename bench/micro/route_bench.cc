// What a decision costs by the ring and by a gRPC stream: one token's experts of a layer, all of them
// resident, at one running daemon ([control] route), in turns.
//
//   route_bench DIRECTORY MODEL [--experts 8] [--batches 60] [--json]
//
// DIRECTORY holds the daemon's two sockets. Calls walk over the layers as a forward pass does, in batches of
// 480 with a pause between them, because no engine routes without computing. The figures are medians over the
// batches of a batch's time divided by its calls, and the median of the ratios of neighbours. A stream's
// answer is checked against the ring's: both must name the same slots. Exit status: 0, or 2 on an error.
#include <moecached/moecached.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/route_client.h"

namespace {

using moecached::test::RouteClient;

constexpr std::size_t kBatchCalls = 480;
constexpr auto kPause =
    std::chrono::milliseconds(25);  // longer than the daemon's tick: the ring is empty again

struct Options {
  std::string directory, model;
  std::size_t n_ids = 8, n_batches = 60;
  bool json = false;
};

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "route_bench: %s\n", text.c_str());
  std::exit(2);
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
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--json") {
      options.json = true;
    } else if (word.starts_with("--") && i + 1 < argc && (word == "--experts" || word == "--batches")) {
      (word == "--experts" ? options.n_ids : options.n_batches) = number(word.c_str(), argv[i + 1]);
      ++i;
    } else {
      places.push_back(word);
    }
  }
  if (places.size() != 2) die("usage: route_bench DIRECTORY MODEL [--experts N] [--batches N] [--json]");
  options.directory = places[0];
  options.model = places[1];
  return options;
}

struct LayerCall {
  std::uint32_t layer = 0;
  std::vector<std::int32_t> ids, slots;
  std::vector<std::uint32_t> ids_on_the_wire;
};

template <typename Call>
double us_per_call(std::vector<LayerCall>& calls, Call call) {
  std::this_thread::sleep_for(kPause);
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kBatchCalls; ++i) call(calls[i % calls.size()]);
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::micro>(end - start).count() / kBatchCalls;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void check(moecached_status status, const char* what) {
  if (status != MOECACHED_OK) die(std::string(what) + ": " + moecached_last_error());
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  moecached_session* session = nullptr;
  moecached_model* model = nullptr;
  moecached_lane* lane = nullptr;
  const std::string handle = options.directory + "/handle.sock";
  const char* const file = options.model.c_str();
  check(moecached_session_open(handle.c_str(), "route_bench", &session), "session");
  check(moecached_model_open(session, &file, 1, &model), "model");
  check(moecached_lane_open(model, &lane), "lane");
  RouteClient client(options.directory + "/control.sock");
  moecached::control::v1::RouteOpen open;
  open.set_label("route_bench");
  if (!client.open(open)) die(client.finish().error_message());

  std::mt19937 random(1);
  std::vector<LayerCall> calls;
  const auto by_ring = [&](LayerCall& call) {
    if (moecached_lane_resolve(lane, call.layer, call.ids.data(), 1, call.ids.size(), 0, call.slots.data()) !=
        MOECACHED_OK)
      die(moecached_last_error());
  };
  const auto by_stream = [&](LayerCall& call) {
    if (!client.decide(call.layer, call.ids_on_the_wire)) die("refused: " + client.refused().text());
    if (client.slots().n_absent() > 0)
      die("an expert was not resident: use a pool with more slots, or an idle daemon");
  };
  for (std::uint32_t layer = 0; layer < moecached_model_layers(model); ++layer) {
    moecached_layer_info info{};
    check(moecached_model_layer(model, layer, &info), "layer");
    LayerCall call{
        .layer = layer, .ids = std::vector<std::int32_t>(info.n_experts), .slots = {}, .ids_on_the_wire = {}};
    for (std::uint32_t i = 0; i < info.n_experts; ++i) call.ids[i] = static_cast<std::int32_t>(i);
    std::ranges::shuffle(call.ids, random);
    call.ids.resize(std::min<std::size_t>({options.n_ids, info.n_slots, info.n_experts}));
    call.slots.resize(call.ids.size());
    call.ids_on_the_wire.assign(call.ids.begin(), call.ids.end());
    by_ring(call);
    by_stream(call);
    if (!std::ranges::equal(call.slots, client.slots().slots(), {},
                            [](std::int32_t slot) { return static_cast<std::uint32_t>(slot); }))
      die("the stream names other slots than the ring");
    calls.push_back(std::move(call));
  }

  std::vector<double> ring, stream, ratios;
  for (std::size_t i = 0; i < options.n_batches; ++i) {
    ring.push_back(us_per_call(calls, by_ring));
    moecached_lane_end(lane);
    stream.push_back(us_per_call(calls, by_stream));
    client.release();
    ratios.push_back(stream.back() / ring.back());
  }
  moecached_counters counters{};
  moecached_model_counters(model, &counters);
  if (counters.fallback_reads > 0) die("the ring's client had to read the file itself");
  const auto [best, worst] = std::ranges::minmax(stream);
  if (options.json) {
    std::printf(
        "{\"ring_us\": %.4f, \"stream_us\": %.2f, \"stream_us_min\": %.2f, \"stream_us_max\": %.2f, "
        "\"ratio\": %.0f, "
        "\"experts\": %zu, \"layers\": %zu}\n",
        median(ring), median(stream), best, worst, median(ratios), calls.front().ids.size(), calls.size());
  } else {
    std::printf(
        "%zu experts, %zu layers: ring %.4f us a decision, gRPC stream %.2f us (batches %.2f..%.2f), %.0f "
        "times\n",
        calls.front().ids.size(), calls.size(), median(ring), median(stream), best, worst, median(ratios));
  }
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
  return 0;
}
