// Seconds until one more process can use a model that the daemon already holds.
//   attach_bench SOCKET MODEL             session, model, windows, first resolve
//   attach_bench SOCKET MODEL GPU-UUID    session, model and windows on that GPU, first epoch; the process's
//   CUDA context included
// Prints {"attach_s": ..., "resident": ...}.
#include <moecached/moecached.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "bench/micro/client.h"

using moecached::bench::check;
using moecached::bench::parse_uuid;

namespace {

using Clock = std::chrono::steady_clock;

void report(Clock::time_point start, bool resident) {
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("{\"attach_s\": %.6f, \"resident\": %s}\n", seconds, resident ? "true" : "false");
}

void attach_gpu(const char* socket, const char* path, const std::uint8_t (&uuid)[16]) {
  const auto start = Clock::now();
  moecached_session* session = nullptr;
  moecached_gpu_model* model = nullptr;
  moecached_gpu_lane* lane = nullptr;
  check(moecached_session_open(socket, "attach_bench", &session));
  check(moecached_gpu_model_open(session, &path, 1, uuid, &model));
  check(moecached_gpu_lane_open(model, &lane));
  check(moecached_gpu_lane_begin(lane));
  report(start, true);
  moecached_gpu_lane_close(lane);
  moecached_gpu_model_close(model);
  moecached_session_close(session);
}

void attach(const char* socket, const char* path) {
  const auto start = Clock::now();
  moecached_session* session = nullptr;
  moecached_model* model = nullptr;
  moecached_lane* lane = nullptr;
  check(moecached_session_open(socket, "attach_bench", &session));
  check(moecached_model_open(session, &path, 1, &model));
  check(moecached_lane_open(model, &lane));
  std::int32_t expert = 0, slot = -1;
  check(moecached_lane_resolve_resident(lane, 0, &expert, 1, &slot));
  report(start, slot >= 0);
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
}

}  // namespace

int main(int argc, char** argv) {
  std::uint8_t uuid[16] = {};
  if (argc == 3) {
    attach(argv[1], argv[2]);
  } else if (argc == 4 && parse_uuid(argv[3], uuid)) {
    attach_gpu(argv[1], argv[2], uuid);
  } else {
    std::fprintf(stderr, "usage: attach_bench SOCKET MODEL [GPU-UUID]\n");
    return 2;
  }
}
