// A daemon under load for so long that what it loses a little of each time would show: lanes resolve, mostly
// what is resident; sessions, lanes and models come and go, each visitor under a new name; policies are
// swapped. Memory and descriptors of the daemon, and of this process with the client in it, must be in the
// last quarter what they were in the second.
//
//   soak --daemon build/daemon/app/moecached --ctl build/client/ctl/moecachectl [--decisions 1000000000]
//   [--threads 2]
//
// A decision is one resolve of a token in a layer. Exit code 0: flat, and no byte was wrong.
#include <fcntl.h>
#include <moecached/moecached.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/stress/command_line.h"
#include "tests/support/gguf_builder.h"

namespace moecached::test {
namespace {

constexpr std::uint32_t kLayers = 4, kExperts = 32, kTopK = 4, kHot = 6;
constexpr std::size_t kSamples = 40;
constexpr std::uint64_t kColdEach = 1 << 15;   // of so many decisions those of one token want any experts
constexpr std::uint64_t kCountEach = 1 << 16;  // decisions that a thread counts together
constexpr std::uint64_t kSession = 3'000'000;  // decisions of one session of a lane
constexpr std::array kPolicies = {
    "slru", "lru", "ewma", "s3fifo", "lfu:halve=64", "learned", "sieve:admit=second-miss"};

using Ids = std::array<std::int32_t, kTopK>;

std::atomic<std::uint64_t> decisions, wrong, failures, fallback_reads, sessions, misses, told_to_stream;
std::atomic<bool> stops;

struct Model {
  std::filesystem::path path;
  std::vector<std::byte> bytes;
  std::uint32_t hot_first = 0;
};

// An open session with a model and a lane.
class Client {
 public:
  Client(const std::string& socket, const std::string& label, const Model& model) : file_(model) {
    const char* const path = model.path.c_str();
    is_open_ = moecached_session_open(socket.c_str(), label.c_str(), &session_) == MOECACHED_OK &&
               moecached_model_open(session_, &path, 1, &model_) == MOECACHED_OK &&
               moecached_lane_open(model_, &lane_) == MOECACHED_OK;
    // Dropped between its registration and this: the daemon says to open it again, and the next visitor does.
    const bool is_dropped = !is_open_ && std::strstr(moecached_last_error(), "open it again") != nullptr;
    if (!is_open_ && !is_dropped) {
      std::fprintf(stderr, "soak: %s\n", moecached_last_error());
      ++failures;
    }
    ++sessions;
  }
  ~Client() {
    if (lane_ != nullptr) moecached_lane_close(lane_);
    if (model_ != nullptr) {
      moecached_counters counters{};
      moecached_model_counters(model_, &counters);
      fallback_reads += counters.fallback_reads;
      misses += counters.leases;
      moecached_model_close(model_);
    }
    if (session_ != nullptr) moecached_session_close(session_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  [[nodiscard]] bool is_open() const { return is_open_; }
  // False: nothing was resolved. Where a lane is not run for 0.1 s within an epoch, it counts as stopped, and
  // another is told to stream: no failure, on a busy machine.
  bool resolve(std::uint32_t layer, const Ids& ids, Ids* slots) {
    const auto status = moecached_lane_resolve(lane_, layer, ids.data(), 1, kTopK, 0, slots->data());
    if (status == MOECACHED_OK) return true;
    if (status == MOECACHED_E_TOO_MANY) {
      ++told_to_stream;
    } else {
      std::fprintf(stderr, "soak: %s\n", moecached_last_error());
      ++failures;
    }
    return false;
  }
  void compare(std::uint32_t layer, const Ids& ids, const Ids& slots) const {
    moecached_layer_info info{};
    (void)moecached_model_layer(model_, layer, &info);
    for (std::size_t i = 0; i < kTopK; ++i) {
      for (std::uint32_t p = 0; p < info.n_parts; ++p) {
        moecached_part_info part{};
        std::uint32_t shard = 0;
        std::uint64_t offset = 0;
        (void)moecached_model_part(model_, layer, p, &part);
        (void)moecached_model_locate(model_, layer, p, static_cast<std::uint32_t>(ids[i]), &shard, &offset);
        const auto* at = static_cast<const std::byte*>(info.window) +
                         static_cast<std::uint64_t>(slots[i]) * info.slot_stride + part.slot_offset;
        if (std::memcmp(at, file_.bytes.data() + offset, part.expert_bytes) != 0) ++wrong;
      }
    }
  }
  void end() { moecached_lane_end(lane_); }

 private:
  const Model& file_;
  moecached_session* session_ = nullptr;
  moecached_model* model_ = nullptr;
  moecached_lane* lane_ = nullptr;
  bool is_open_ = false;
};

Ids draw(std::mt19937& random, std::uint32_t first, std::uint32_t span) {
  Ids ids{};
  const auto at = static_cast<std::uint32_t>(random());
  for (std::uint32_t i = 0; i < kTopK; ++i)
    ids[i] = static_cast<std::int32_t>((first + (at + i) % span) % kExperts);
  return ids;
}

void run_lane(const std::string& socket, std::array<const Model*, 2> models, unsigned seed) {
  std::mt19937 random(seed);
  for (std::size_t round = 0; !stops; ++round) {
    Client client(socket, "lane", *models[round % models.size()]);
    if (!client.is_open()) continue;
    // Drawn before: the loop is to be resolve's own time.
    std::array<Ids, 256> hot{};
    for (Ids& ids : hot) ids = draw(random, models[round % models.size()]->hot_first, kHot);
    Ids slots{};
    for (std::uint64_t n = 0; n < kSession && !stops; ++n) {
      const auto layer = static_cast<std::uint32_t>(n % kLayers);
      const bool is_cold = n % kColdEach < kLayers;
      const Ids ids = is_cold ? draw(random, 0, kExperts) : hot[n % hot.size()];
      const bool is_resolved = client.resolve(layer, ids, &slots);
      if (is_resolved && n % kColdEach < 2 * kLayers) client.compare(layer, ids, slots);
      if ((n + 1) % kCountEach == 0) decisions += kCountEach;
    }
    client.end();
  }
}

void visit(const std::string& socket, const std::string& label, const Model& model, std::mt19937& random) {
  Client client(socket, label, model);
  Ids slots{};
  for (int token = 0; client.is_open() && token < 10; ++token) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const Ids ids = draw(random, 0, kExperts);
      if (client.resolve(layer, ids, &slots)) client.compare(layer, ids, slots);
    }
    client.end();
  }
}

void run_visitors(const std::string& socket, const Model& model) {
  std::mt19937 random(99);
  for (std::uint64_t n = 0; !stops; ++n) {
    visit(socket, "visitor-" + std::to_string(n), model, random);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which nobody has the model
  }
}

pid_t start(const std::vector<std::string>& arguments, bool is_quiet) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, STDOUT_FILENO);
    if (is_quiet) ::dup2(null, STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  return child;
}

// What a process has now.
struct Sample {
  std::uint64_t rss_kib = 0, anonymous_kib = 0, descriptors = 0, threads = 0;
};
Sample look(pid_t pid) {
  Sample sample;
  const std::string folder = "/proc/" + std::to_string(pid);
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    const auto number = [&](std::string_view name, std::uint64_t* out) {
      if (line.starts_with(name)) *out = std::strtoull(line.c_str() + name.size(), nullptr, 10);
    };
    number("VmRSS:", &sample.rss_kib);
    number("RssAnon:", &sample.anonymous_kib);
  }
  // Not the workers that the kernel has for io_uring, as many as there are reads at once.
  for (const auto& task : std::filesystem::directory_iterator(folder + "/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.starts_with("iou-")) ++sample.threads;
  }
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder + "/fd"))
    ++sample.descriptors;
  return sample;
}

Sample most(const std::vector<Sample>& samples, std::size_t quarter) {
  Sample out;
  for (std::size_t i = samples.size() * quarter / 4; i < samples.size() * (quarter + 1) / 4; ++i) {
    out.rss_kib = std::max(out.rss_kib, samples[i].rss_kib);
    out.anonymous_kib = std::max(out.anonymous_kib, samples[i].anonymous_kib);
    out.descriptors = std::max(out.descriptors, samples[i].descriptors);
    out.threads = std::max(out.threads, samples[i].threads);
  }
  return out;
}

// Memory may move by 3 % and 256 KiB (an allocator's arenas), with what is mapped by 1 MiB: a visitor's
// segments, as its descriptors. gRPC starts a thread when calls meet, and ends it again.
bool is_flat(const char* who, const std::vector<Sample>& samples) {
  const Sample before = most(samples, 1), after = most(samples, 3);
  const auto grew = [](std::uint64_t from, std::uint64_t to, std::uint64_t kib) {
    return to > from + from * 3 / 100 + kib;
  };
  const bool flat = !grew(before.rss_kib, after.rss_kib, 1024) &&
                    !grew(before.anonymous_kib, after.anonymous_kib, 256) &&
                    after.descriptors <= before.descriptors + 8 && after.threads <= before.threads + 2;
  std::printf(
      "%s: second quarter %llu KiB (%llu of its own), %llu descriptors, %llu threads; last quarter %llu KiB "
      "(%llu), %llu, %llu: %s\n",
      who, static_cast<unsigned long long>(before.rss_kib),
      static_cast<unsigned long long>(before.anonymous_kib),
      static_cast<unsigned long long>(before.descriptors), static_cast<unsigned long long>(before.threads),
      static_cast<unsigned long long>(after.rss_kib), static_cast<unsigned long long>(after.anonymous_kib),
      static_cast<unsigned long long>(after.descriptors), static_cast<unsigned long long>(after.threads),
      flat ? "flat" : "grows");
  return flat;
}

struct Options {
  std::string daemon, ctl;
  std::uint64_t decisions = 1'000'000'000;
  int threads = 2;
};

std::optional<int> parse(int argc, char** argv, Options* options) {
  CLI::App app{"Keeps a daemon under load: memory and descriptors must be flat, and no byte wrong.", "soak"};
  app.add_option("--daemon", options->daemon, "moecached")
      ->required()
      ->check(CLI::ExistingFile)
      ->type_name("PATH");
  app.add_option("--ctl", options->ctl, "moecachectl")
      ->required()
      ->check(CLI::ExistingFile)
      ->type_name("PATH");
  app.add_option("--decisions", options->decisions, "resolves of a token in a layer (1000000000)")
      ->check(CLI::Range(kSamples * kCountEach, std::uint64_t{1'000'000'000'000}))
      ->type_name("N");
  app.add_option("--threads", options->threads, "that decode (2)")->check(CLI::Range(1, 64))->type_name("N");
  return parse_or_end(app, argc, argv);
}

int run(int argc, char** argv) {
  Options options;
  if (const std::optional<int> ends = parse(argc, argv, &options)) return *ends;
  const std::uint64_t goal = options.decisions;
  char name[] = "/tmp/moecached-soak-XXXXXX";
  if (::mkdtemp(name) == nullptr) return 2;
  const std::filesystem::path folder = name;
  std::array<Model, 3> models;
  for (std::size_t i = 0; i < models.size(); ++i) {
    models[i].path = folder / ("model-" + std::to_string(i) + ".gguf");
    models[i].bytes = make_moe({.name = "soak " + std::to_string(i),
                                .n_layers = kLayers,
                                .n_experts = kExperts,
                                .n_expert_used = kTopK})
                          .build()
                          .bytes;
    write_file(models[i].path, models[i].bytes);
    models[i].hot_first = static_cast<std::uint32_t>(i) * kHot;
  }
  const std::string socket = folder / "handle.sock", control = folder / "control.sock";
  const pid_t daemon = start({options.daemon, "--directory", folder, "--slots", "16", "--pool-bytes", "16MiB",
                              "--gpu-devices", "none", "--scrub-period", "10s", "--log-level", "warning"},
                             false);
  for (int i = 0; i < 2000 && ::access(control.c_str(), F_OK) != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));

  std::vector<std::thread> threads;
  threads.emplace_back(run_visitors, socket, std::cref(models[2]));
  // Theirs is model 1 then, and the next number each time that it is opened anew.
  while (sessions < 2 && failures == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (int i = 0; i < options.threads; ++i) {
    const auto first = static_cast<std::size_t>(i) % 2;
    threads.emplace_back([&, first, i] {
      run_lane(socket, {&models[first], &models[1 - first]}, static_cast<unsigned>(i));
    });
  }

  std::vector<Sample> of_daemon, of_clients;
  std::printf("%12s %8s %12s %12s %5s %12s %5s %9s %8s\n", "decisions", "seconds", "daemon KiB", "of its own",
              "fds", "clients KiB", "fds", "sessions", "misses");
  const auto begin = std::chrono::steady_clock::now();
  auto steered = begin;
  std::uint64_t n_swaps = 0, n_drops = 0;
  bool is_alive = true;
  while (of_daemon.size() < kSamples && failures == 0 && is_alive) {
    const auto now = std::chrono::steady_clock::now();
    if (now - steered > std::chrono::seconds(1)) {
      steered = now;
      int status = 0;
      ::waitpid(
          start({options.ctl, "--socket", control, "policy", "set", kPolicies[n_swaps++ % kPolicies.size()]},
                true),
          &status, 0);
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ++failures;
      // The visitors' model, unless one is there just now.
      ::waitpid(
          start({options.ctl, "--socket", control, "drop", std::to_string(n_drops == 0 ? 1 : 3 + n_drops)},
                true),
          &status, 0);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) ++n_drops;
    }
    is_alive = ::waitpid(daemon, nullptr, WNOHANG) == 0;
    if (decisions < goal / kSamples * (of_daemon.size() + 1)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    of_daemon.push_back(look(daemon));
    of_clients.push_back(look(::getpid()));
    std::printf(
        "%12llu %8.1f %12llu %12llu %5llu %12llu %5llu %9llu %8llu\n",
        static_cast<unsigned long long>(decisions.load()), std::chrono::duration<double>(now - begin).count(),
        static_cast<unsigned long long>(of_daemon.back().rss_kib),
        static_cast<unsigned long long>(of_daemon.back().anonymous_kib),
        static_cast<unsigned long long>(of_daemon.back().descriptors),
        static_cast<unsigned long long>(of_clients.back().rss_kib),
        static_cast<unsigned long long>(of_clients.back().descriptors),
        static_cast<unsigned long long>(sessions.load()), static_cast<unsigned long long>(misses.load()));
    std::fflush(stdout);
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
  ::kill(daemon, SIGTERM);
  int status = 0;
  const bool ended_well =
      is_alive && ::waitpid(daemon, &status, 0) == daemon && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::filesystem::remove_all(folder);
  const auto n = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("%llu policy swaps, %llu models dropped and opened again, %llu wrong experts, %llu failures, ",
              n(n_swaps), n(n_drops), n(wrong), n(failures));
  std::printf("%llu fallback reads, %llu told to stream, daemon ended %s\n", n(fallback_reads),
              n(told_to_stream), ended_well ? "well" : "badly");
  const bool is_whole =
      of_daemon.size() == kSamples && wrong == 0 && failures == 0 && fallback_reads == 0 && ended_well;
  if (of_daemon.size() < kSamples) return 1;
  const bool daemon_flat = is_flat("daemon", of_daemon), clients_flat = is_flat("clients", of_clients);
  return is_whole && daemon_flat && clients_flat ? 0 : 1;
}

}  // namespace
}  // namespace moecached::test

int main(int argc, char** argv) { return moecached::test::run(argc, argv); }
