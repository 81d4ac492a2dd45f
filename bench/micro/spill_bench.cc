// What one prompt of a model that spills costs, but for its kernels: layer by layer every part of every
// expert is brought into memory of the GPU as the plugin has it done for a batch that uses all of them.
//   spill_bench SOCKET MODEL GPU-UUID [PROMPTS] [COMPUTE_US]
// COMPUTE_US is slept behind each layer, in which a GPU would compute it. Prints a line for each prompt, with
// what of its bytes came from the SSD.
#include <moecached/moecached.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <thread>
#include <vector>

#include "bench/micro/client.h"
#include "daemon/platform/cuda_driver.h"

using moecached::bench::check;
using moecached::bench::parse_uuid;

namespace {

using Clock = std::chrono::steady_clock;

void check_cuda(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "spill_bench: %s: %d\n", what, static_cast<int>(result));
  std::exit(1);
}

struct Bench {
  const moecached::CudaDriver* cu = nullptr;
  moecached_model* model = nullptr;
  moecached_spill_lane* lane = nullptr;
  CUevent ready = nullptr;
  std::vector<CUdeviceptr> parts;  // room for the part of all experts of any layer

  void make_room() {
    std::vector<std::uint64_t> bytes;
    for (std::uint32_t l = 0; l < moecached_model_layers(model); ++l) {
      moecached_layer_info layer{};
      check(moecached_model_layer(model, l, &layer));
      bytes.resize(std::max<std::size_t>(bytes.size(), layer.n_parts));
      for (std::uint32_t p = 0; p < layer.n_parts; ++p) {
        moecached_part_info part{};
        check(moecached_model_part(model, l, p, &part));
        bytes[p] = std::max(bytes[p], part.expert_bytes * layer.n_experts);
      }
    }
    for (const std::uint64_t n : bytes)
      check_cuda(cu->cuMemAlloc(&parts.emplace_back(), n), "memory for a layer's experts");
  }

  void prompt(std::uint32_t compute_us) {
    for (std::uint32_t l = 0; l < moecached_model_layers(model); ++l) {
      moecached_layer_info layer{};
      check(moecached_model_layer(model, l, &layer));
      std::vector<std::int32_t> experts(layer.n_experts);
      std::iota(experts.begin(), experts.end(), 0);
      check(moecached_spill_begin_layer(lane, l, experts.data(), experts.size()));
      for (std::uint32_t p = 0; p < layer.n_parts; ++p)
        check(moecached_spill_load_part(lane, p, parts[p], ready));
      check_cuda(cu->cuEventSynchronize(ready), "copies");
      if (compute_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(compute_us));
    }
    moecached_spill_end(lane);
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::uint8_t uuid[16] = {};
  if (argc < 4 || argc > 6 || !parse_uuid(argv[3], uuid)) {
    std::fprintf(stderr, "usage: spill_bench SOCKET MODEL GPU-UUID [PROMPTS] [COMPUTE_US]\n");
    return 2;
  }
  const int n_prompts = argc > 4 ? std::atoi(argv[4]) : 5;
  const auto compute_us = static_cast<std::uint32_t>(argc > 5 ? std::atoi(argv[5]) : 0);
  Bench bench;
  auto driver = moecached::CudaDriver::load();
  if (!driver) {
    std::fprintf(stderr, "spill_bench: %s\n", driver.error().text.c_str());
    return 1;
  }
  bench.cu = *driver;
  moecached_session* session = nullptr;
  check(moecached_session_open(argv[1], "spill_bench", &session));
  check(moecached_spill_model_open(session, &argv[2], 1, uuid, &bench.model));
  check(moecached_spill_lane_open(bench.model, &bench.lane));
  CUcontext context = nullptr;
  check_cuda(bench.cu->cuDevicePrimaryCtxRetain(&context, 0), "context");
  check_cuda(bench.cu->cuCtxPushCurrent(context), "context");
  check_cuda(bench.cu->cuEventCreate(&bench.ready, CU_EVENT_DISABLE_TIMING), "event");
  bench.make_room();
  for (int i = 0; i < n_prompts; ++i) {
    moecached_counters before{}, after{};
    moecached_model_counters(bench.model, &before);
    const auto start = Clock::now();
    bench.prompt(compute_us);
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    moecached_model_counters(bench.model, &after);
    std::printf(
        "{\"prompt_ms\": %.2f, \"lookups\": %llu, \"streamed_parts\": %llu, \"fallback_reads\": %llu}\n", ms,
        static_cast<unsigned long long>(after.lookups - before.lookups),
        static_cast<unsigned long long>(after.streamed_experts - before.streamed_experts),
        static_cast<unsigned long long>(after.fallback_reads - before.fallback_reads));
  }
  moecached_spill_lane_close(bench.lane);
  moecached_model_close(bench.model);
  moecached_session_close(session);
}
