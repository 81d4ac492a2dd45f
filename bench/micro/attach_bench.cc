// Seconds until one more process can use a model that the daemon already holds: session, model, windows, first resolve.
//   attach_bench SOCKET MODEL      prints {"attach_s": ..., "resident": ...}
#include <moecached/moecached.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {
void check(moecached_status status) {
  if (status == MOECACHED_OK) return;
  std::fprintf(stderr, "attach_bench: %s\n", moecached_last_error());
  std::exit(1);
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: attach_bench SOCKET MODEL\n");
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  moecached_session* session = nullptr;
  moecached_model* model = nullptr;
  moecached_lane* lane = nullptr;
  check(moecached_session_open(argv[1], "attach_bench", &session));
  check(moecached_model_open(session, &argv[2], 1, &model));
  check(moecached_lane_open(model, &lane));
  std::int32_t expert = 0, slot = -1;
  check(moecached_lane_resolve_resident(lane, 0, &expert, 1, &slot));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("{\"attach_s\": %.6f, \"resident\": %s}\n", seconds, slot >= 0 ? "true" : "false");
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
}
