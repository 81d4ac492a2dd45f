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

namespace {

using Clock = std::chrono::steady_clock;

void check(moecached_status status) {
  if (status == MOECACHED_OK) return;
  std::fprintf(stderr, "attach_bench: %s\n", moecached_last_error());
  std::exit(1);
}

void report(Clock::time_point start, bool resident) {
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("{\"attach_s\": %.6f, \"resident\": %s}\n", seconds, resident ? "true" : "false");
}

// "GPU-01234567-89ab-..." as nvidia-smi -L prints it.
bool parse_uuid(std::string_view text, std::uint8_t (&uuid)[16]) {
  if (!text.starts_with("GPU-")) return false;
  std::size_t digits = 0;
  for (const char c : text.substr(4)) {
    if (c == '-') continue;
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0 || digits == 32) return false;
    uuid[digits / 2] = static_cast<std::uint8_t>(uuid[digits / 2] << 4 | value);
    ++digits;
  }
  return digits == 32;
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
