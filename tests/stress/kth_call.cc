// Every k-th call of a kind fails, for each k in turn: no lane may ever read a wrong byte. A run is a process
// of its own with the real daemon and the real client in it: sessions, models and lanes come and go, slots
// are swapped all the time, every slot that a lane is given is compared with the file. Whatever the client
// cannot have it must be told in a sentence.
//
//   kth_call [--kinds pread,uring,map,new,cuda] [--first 1] [--last 1000] [--step 1] [--canary]
//
// --canary: each k-th read of a file brings one wrong byte. The comparison must see it. Exit code 0: as
// promised.
#include <moecached/moecached.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/ipc/daemon.h"
#include "tests/stress/command_line.h"
#include "tests/stress/failing_calls.h"
#include "tests/stress/kth_call.h"
#include "tests/support/gguf_builder.h"

namespace moecached::test {
namespace {

constexpr std::uint32_t kSlots = 5;  // one more than a token needs
constexpr int kTokensMax = 600;      // of a lane
constexpr int kTokensMin = 12;
constexpr int kTokensASession = 6;
constexpr std::uint64_t kRunsARow = 200;
constexpr unsigned kSecondsMax = 300;  // then a run hangs; it takes one, but a machine may be busy

std::filesystem::path folder, model;
std::string socket_path;
std::vector<std::byte> file;
Tally* tally = nullptr;  // of the run, shared with its process

void tell_failure() {
  ++tally->errors;
  if (moecached_last_error()[0] == '\0') ++tally->errors_without_words;
}

void compare(const moecached_model* opened, std::uint32_t layer, std::int32_t id, std::int32_t slot) {
  moecached_layer_info info{};
  if (moecached_model_layer(opened, layer, &info) != MOECACHED_OK) return tell_failure();
  ++tally->compared;
  for (std::uint32_t p = 0; p < info.n_parts; ++p) {
    moecached_part_info part{};
    std::uint32_t shard = 0;
    std::uint64_t offset = 0;
    if (moecached_model_part(opened, layer, p, &part) != MOECACHED_OK ||
        moecached_model_locate(opened, layer, p, static_cast<std::uint32_t>(id), &shard, &offset) !=
            MOECACHED_OK)
      return tell_failure();
    const auto* at = static_cast<const std::byte*>(info.window) +
                     static_cast<std::uint64_t>(slot) * info.slot_stride + part.slot_offset;
    tally->wrong += wrong_bytes(at, offset, part.expert_bytes);
  }
}

void decode(const moecached_model* opened, moecached_lane* lane, unsigned* random) {
  for (std::uint32_t layer = 0; layer < moecached_model_layers(opened); ++layer) {
    std::int32_t ids[kRunTopK], slots[kRunTopK];
    const auto first = static_cast<std::uint32_t>(::rand_r(random));
    const auto step = static_cast<std::uint32_t>(::rand_r(random)) | 1;  // odd: distinct
    for (std::uint32_t i = 0; i < kRunTopK; ++i)
      ids[i] = static_cast<std::int32_t>((first + step * i) % kRunExperts);
    if (moecached_lane_resolve(lane, layer, ids, 1, kRunTopK, 0, slots) != MOECACHED_OK) {
      tell_failure();
      continue;
    }
    ++tally->served;
    for (std::uint32_t i = 0; i < kRunTopK; ++i) compare(opened, layer, ids[i], slots[i]);
  }
  moecached_lane_end(lane);
}

// Allocates nothing itself: where operator new fails, it is daemon and client that are to be seen failing.
void* run_lane(void* seed) {
  auto random = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(seed));
  const char* const path = model.c_str();
  for (int done = 0;
       done < kTokensMax &&
       (done < kTokensMin || std::max<std::uint64_t>(calls_seen(), tally->calls_seen) < tally->enough);) {
    moecached_session* session = nullptr;
    moecached_model* opened = nullptr;
    moecached_lane* lane = nullptr;
    if (moecached_session_open(socket_path.c_str(), "kth", &session) != MOECACHED_OK ||
        moecached_model_open(session, &path, 1, &opened) != MOECACHED_OK ||
        moecached_lane_open(opened, &lane) != MOECACHED_OK) {
      tell_failure();
    }
    for (int i = 0; i < kTokensASession; ++i, ++done) {
      if (lane != nullptr) decode(opened, lane, &random);
    }
    if (lane != nullptr) moecached_lane_close(lane);
    if (opened != nullptr) {
      moecached_counters counters{};
      moecached_model_counters(opened, &counters);
      tally->fallback_reads += counters.fallback_reads;
      moecached_model_close(opened);
    }
    if (session != nullptr) moecached_session_close(session);
  }
  return nullptr;
}

Config config_for(CallKind kind) {
  Config config;
  config.handle_socket = folder / "handle.sock";
  config.pool_bytes = 64u << 20;
  config.slots = {.kind = SlotsSpec::Kind::kCount, .value = kSlots};
  config.gpu.devices = "none";
  config.scrub_period_ms = 0;
  config.ssd.engine = kind == CallKind::kUring ? SsdEngine::kIoUring : SsdEngine::kPread;
  return config;
}

// With the calls failing from the start for half of the runs; the others' daemon and model are there before
// the first one fails.
std::unique_ptr<Daemon> start_daemon(const FailingCalls& calls) {
  const Config config = config_for(calls.kind);
  const bool is_late = calls.k % 2 == 0;
  if (!is_late) arm(calls);
  auto daemon = Daemon::start(config);
  if (!daemon) {
    ++tally->errors;
    if (daemon.error().text.empty()) ++tally->errors_without_words;
    return nullptr;
  }
  if (is_late) {
    if (!(*daemon)->register_model({model.string()})) ++tally->errors;
    arm(calls);
  }
  return *std::move(daemon);
}

void run_lanes(std::uint64_t k) {
  pthread_t lanes[2];
  for (std::uintptr_t i = 0; i < std::size(lanes); ++i) {
    // A thread's stack is glibc's own mapping, which never fails here.
    if (::pthread_create(&lanes[i], nullptr, run_lane, reinterpret_cast<void*>(k * 2 + i)) != 0) std::abort();
  }
  for (pthread_t lane : lanes) ::pthread_join(lane, nullptr);
}

void note_calls() {
  tally->calls_seen = calls_seen();
  tally->calls_failed = calls_failed();
}

void run_on_cpu(const FailingCalls& calls) {
  const auto daemon = start_daemon(calls);
  if (daemon) run_lanes(calls.k);
  note_calls();
  disarm();
}

// Without memory a thread of the daemon may end the daemon (std::bad_alloc), which clients survive: it has a
// process of its own. k % 4 < 2: the calls are the client's, which must answer each with a status.
void run_in_two(const FailingCalls& calls) {
  const bool is_clients = calls.k % 4 < 2;
  int ready[2];
  if (::pipe(ready) != 0) std::abort();
  const pid_t daemon_process = ::fork();
  if (daemon_process == 0) {
    ::close(ready[0]);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(STDERR_FILENO);  // "terminate called after"
    const auto daemon = start_daemon(is_clients ? FailingCalls{} : calls);
    if (!is_clients) note_calls();
    if (!daemon || ::write(ready[1], "r", 1) != 1) ::_exit(0);
    for (;;) {
      if (!is_clients) note_calls();
      ::usleep(1000);
    }
  }
  ::close(ready[1]);
  char byte = 0;
  const bool is_up = ::read(ready[0], &byte, 1) == 1;  // or it has ended
  if (is_clients) arm(calls);
  if (is_up) run_lanes(calls.k);
  if (is_clients) note_calls();
  disarm();
  int status = 0;
  if (::waitpid(daemon_process, &status, WNOHANG) == daemon_process) {
    if (!WIFSIGNALED(status)) return;
    if (tally->calls_failed == 0) tally->calls_failed = 1;  // it ended before it could say so
    ++tally->daemons_ended;
  } else {
    ::kill(daemon_process, SIGKILL);
    ::waitpid(daemon_process, &status, 0);
  }
}

struct Kind {
  const char* name;
  CallKind calls;
};
constexpr Kind kKinds[] = {{"pread", CallKind::kPread},
                           {"uring", CallKind::kUring},
                           {"map", CallKind::kMap},
                           {"new", CallKind::kNew},
                           {"cuda", CallKind::kNone}};

struct Sum {
  std::uint64_t runs = 0, met = 0, aborted = 0, hung = 0;
  Tally tally{};
};

// In a process of its own, which may end in any way.
void run(const Kind& kind, const FailingCalls& calls, Sum* sum) {
  new (tally) Tally();
  tally->enough = calls.k + 16;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kSecondsMax);
    spdlog::set_level(spdlog::level::off);
    if (std::string_view(kind.name) == "cuda") {
      run_on_gpu(folder, model, calls.k, calls.each, tally);
    } else if (kind.calls == CallKind::kNew) {
      run_in_two(calls);
    } else {
      run_on_cpu(calls);
    }
    ::_exit(0);  // what is left is the kernel's: static destructors would meet threads of libraries
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ++sum->runs;
  const bool is_hung = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
  const bool is_aborted = !is_hung && (!WIFEXITED(status) || WEXITSTATUS(status) != 0);
  sum->hung += is_hung ? 1 : 0;
  sum->aborted += is_aborted ? 1 : 0;
  sum->met += tally->calls_failed > 0 ? 1 : 0;
  if (is_hung || is_aborted || (tally->wrong > 0 && !calls.spoils) || tally->errors_without_words > 0) {
    std::printf("%s k %llu%s: %s%llu wrong bytes, %llu failures without words, status %x\n", kind.name,
                static_cast<unsigned long long>(calls.k), calls.each ? " each" : "",
                is_hung      ? "hangs, "
                : is_aborted ? "aborted, "
                             : "",
                static_cast<unsigned long long>(tally->wrong),
                static_cast<unsigned long long>(tally->errors_without_words), static_cast<unsigned>(status));
    std::fflush(stdout);
  }
  sum->tally += *tally;
}

void print(const Kind& kind, const Sum& sum) {
  const auto n = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  const Tally& t = sum.tally;
  std::printf("%-6s %6llu %6llu %9llu %10llu %8llu %9llu %9llu %8llu %6llu %6llu %6llu\n", kind.name,
              n(sum.runs), n(sum.met), n(t.calls_failed), n(t.compared), n(t.wrong), n(t.served),
              n(t.fallback_reads), n(t.errors), n(t.daemons_ended), n(sum.aborted), n(sum.hung));
  std::fflush(stdout);
}

struct Options {
  std::vector<std::string> kinds;
  std::uint64_t first = 1, last = 1000, step = 1;
  bool is_canary = false;
};

std::optional<int> parse(int argc, char** argv, Options* options) {
  for (const Kind& kind : kKinds) options->kinds.emplace_back(kind.name);
  CLI::App app{"Has every k-th call of a kind fail, for each k in turn: no lane may read a wrong byte.",
               "kth_call"};
  const CLI::Range range(std::uint64_t{1}, std::uint64_t{1'000'000});
  app.add_option("--kinds", options->kinds, "pread, uring, map, new, cuda (all)")
      ->delimiter(',')
      ->check(CLI::IsMember(options->kinds))
      ->type_name("LIST");
  app.add_option("--first", options->first, "k begins with (1)")->check(range)->type_name("K");
  app.add_option("--last", options->last, "k ends with (1000)")->check(range)->type_name("K");
  app.add_option("--step", options->step, "from k to k (1)")->check(range)->type_name("N");
  app.add_flag("--canary", options->is_canary,
               "each k-th read of a file brings one wrong byte, which the comparison must see");
  const std::optional<int> ends = parse_or_end(app, argc, argv);
  if (options->is_canary) options->kinds = {"pread"};
  return ends;
}

int main_of(int argc, char** argv) {
  Options options;
  if (const std::optional<int> ends = parse(argc, argv, &options)) return *ends;
  char name[] = "/tmp/moecached-kth-call-XXXXXX";
  if (::mkdtemp(name) == nullptr) return 2;
  folder = name;
  model = folder / "model.gguf";
  socket_path = folder / "handle.sock";
  void* const shared =
      ::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  tally = static_cast<Tally*>(shared);
  ::setenv("MOECACHED_WAIT_MS", "500", 1);  // for an answer that does not come

  bool is_good = true;
  std::printf("%-6s %6s %6s %9s %10s %8s %9s %9s %8s %6s %6s %6s\n", "kind", "runs", "met", "failed",
              "experts", "wrong", "served", "fallback", "errors", "ended", "abort", "hang");
  for (const Kind& kind : kKinds) {
    if (std::ranges::find(options.kinds, kind.name) == options.kinds.end()) continue;
    const bool is_gpus = std::string_view(kind.name) == "cuda";
    if (is_gpus && !has_gpu_runs()) continue;
    // On a GPU each part has chunks of 2 MiB of its own, which a driver of host memory fills: few, so that a
    // run is short.
    file =
        make_moe(
            {.n_layers = kRunLayers, .n_experts = kRunExperts, .n_expert_used = kRunTopK, .biases = !is_gpus})
            .build()
            .bytes;
    write_file(model, file);
    Sum sum;
    for (std::uint64_t k = options.first; k <= options.last; k += options.step) {
      if (sum.runs > 0 && sum.runs % kRunsARow == 0) print(kind, sum);  // so far
      for (const bool each : {false, true}) {
        if (options.is_canary && !each) continue;
        run(kind, {.kind = kind.calls, .k = k, .each = each, .spoils = options.is_canary}, &sum);
      }
    }
    print(kind, sum);
    const Tally& t = sum.tally;
    const bool is_kept = t.wrong == 0 && sum.hung == 0 && sum.aborted == 0 && t.errors_without_words == 0 &&
                         sum.met > 0 && t.compared > 0;
    is_good = is_good && (options.is_canary ? t.wrong > 0 : is_kept);
  }
  std::filesystem::remove_all(folder);
  std::printf("%s\n", options.is_canary
                          ? (is_good ? "the comparison sees wrong bytes" : "the comparison is blind")
                          : (is_good ? "kept" : "broken"));
  return is_good ? 0 : 1;
}

}  // namespace

std::uint64_t wrong_bytes(const std::byte* at, std::uint64_t file_offset, std::uint64_t bytes) {
  const std::byte* const expected = file.data() + file_offset;
  if (std::memcmp(at, expected, bytes) == 0) return 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < bytes; ++i) wrong += at[i] != expected[i] ? 1 : 0;
  return wrong;
}

}  // namespace moecached::test

int main(int argc, char** argv) { return moecached::test::main_of(argc, argv); }
