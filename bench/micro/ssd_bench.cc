// How fast the SSD tier reads random aligned blocks of a file into a pool, with a fixed number of them
// outstanding: to be compared with fio at the same block size, depth and file (fio --rw=randread --direct=1
// --ioengine=io_uring).
//
// Say which pages both read into: some disks (virtio) cost by the memory segment, and a block in scattered
// 4 KiB pages was read there at a third of the speed of one in huge pages, by fio as well. The pool here is
// the daemon's: huge pages where the kernel can (Linux 6.1), which the line printed says. --staged has
// destinations that direct I/O does not take, as for experts that are not aligned in the file.
//
//   ssd_bench FILE [--block 1MiB] [--depth 32] [--seconds 3] [--engine auto|io_uring|pread] [--staged]
//   [--buffered] [--json]
#include <fcntl.h>
#include <poll.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/platform/clock.h"
#include "daemon/platform/device.h"
#include "daemon/platform/file.h"
#include "daemon/platform/huge_pages.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {
namespace {

struct Settings {
  std::string file;
  std::uint64_t block_bytes = 1u << 20;
  std::uint32_t depth = 32;
  double seconds = 3;
  SsdEngine engine = SsdEngine::kAuto;
  bool staged = false;
  bool buffered = false;  // through the page cache
  bool json = false;
};

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  if (unit.empty()) return value;
  if (unit == "KiB") return value << 10;
  if (unit == "MiB") return value << 20;
  if (unit == "GiB") return value << 30;
  return std::nullopt;
}

std::optional<Settings> parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--json") {
      settings.json = true;
    } else if (flag == "--staged") {
      settings.staged = true;
    } else if (flag == "--buffered") {
      settings.buffered = true;
    } else if (!flag.starts_with("--") && settings.file.empty()) {
      settings.file = flag;
    } else if (i + 1 < argc) {
      const std::string_view value = argv[++i];
      const std::optional<std::uint64_t> number = parse_bytes(value);
      if (flag == "--engine" && (value == "auto" || value == "io_uring" || value == "pread")) {
        settings.engine = value == "auto"    ? SsdEngine::kAuto
                          : value == "pread" ? SsdEngine::kPread
                                             : SsdEngine::kIoUring;
      } else if (flag == "--block" && number && *number > 0 && *number % 4096 == 0) {
        settings.block_bytes = *number;
      } else if (flag == "--depth" && number && *number > 0 && *number <= 1024) {
        settings.depth = static_cast<std::uint32_t>(*number);
      } else if (flag == "--seconds" && number && *number > 0) {
        settings.seconds = static_cast<double>(*number);
      } else {
        std::fprintf(stderr, "ssd_bench: %s does not take \"%s\"\n", argv[i - 1], argv[i]);
        return std::nullopt;
      }
    } else {
      std::fprintf(stderr, "ssd_bench: \"%s\" is not an option\n", argv[i]);
      return std::nullopt;
    }
  }
  if (!settings.file.empty()) return settings;
  std::fprintf(stderr,
               "usage: ssd_bench FILE [--block 1MiB] [--depth 32] [--seconds 3] [--engine "
               "auto|io_uring|pread] "
               "[--staged] [--buffered] [--json]\n");
  return std::nullopt;
}

struct Measured {
  std::uint64_t n_reads = 0, n_failed = 0;
  double seconds = 0;
};

// Keeps `depth` requests of one block each outstanding.
class Load {
 public:
  Load(const Settings& settings, SsdTier& tier, FileId file, std::uint64_t file_bytes, std::byte* memory)
      : settings_(settings),
        tier_(tier),
        file_(file),
        memory_(memory),
        blocks_(0, file_bytes / settings.block_bytes - 1) {}

  Measured run(double seconds) {
    Measured measured;
    const std::uint64_t start = monotonic_ns();
    const auto budget = static_cast<std::uint64_t>(seconds * 1e9);
    std::vector<ReadRequest> first;
    for (std::uint32_t i = 0; i < settings_.depth; ++i) first.push_back(request(i));
    std::uint32_t outstanding = static_cast<std::uint32_t>(tier_.submit(first));
    std::vector<ReadDone> done(settings_.depth);
    std::vector<ReadRequest> next;
    while (outstanding > 0) {
      pollfd event{tier_.event_fd(), POLLIN, 0};
      ::poll(&event, 1, -1);
      const std::size_t n = tier_.poll(done);
      outstanding -= static_cast<std::uint32_t>(n);
      const bool go_on = monotonic_ns() - start < budget;
      next.clear();
      for (std::size_t i = 0; i < n; ++i) {
        ++measured.n_reads;
        if (done[i].result != ReadResult::kOk) ++measured.n_failed;
        if (go_on) next.push_back(request(static_cast<std::uint32_t>(done[i].tag)));
      }
      if (!next.empty()) outstanding += static_cast<std::uint32_t>(tier_.submit(next));
    }
    measured.seconds = static_cast<double>(monotonic_ns() - start) / 1e9;
    return measured;
  }

 private:
  ReadRequest request(std::uint32_t index) {
    ReadRequest request;
    request.tag = index;
    request.n_parts = 1;
    request.parts[0] =
        PartRead{file_, blocks_(random_) * settings_.block_bytes, settings_.block_bytes,
                 memory_ + index * settings_.block_bytes + (settings_.staged ? 64 : 0), !settings_.staged};
    return request;
  }

  const Settings& settings_;
  SsdTier& tier_;
  FileId file_;
  std::byte* memory_;
  std::mt19937_64 random_{1};
  std::uniform_int_distribution<std::uint64_t> blocks_;
};

void print(const Settings& settings, const Measured& measured, const SsdStats& stats) {
  const double gigabytes =
      static_cast<double>(measured.n_reads * settings.block_bytes) / 1e9 / measured.seconds;
  const double latency_us = stats.requests == 0 ? 0
                                                : static_cast<double>(stats.latency_ns_total) / 1e3 /
                                                      static_cast<double>(stats.requests);
  // The tier says so when it could not have them.
  const bool huge_pages = stats.fallback_reason.find("small pages") == std::string::npos;
  if (settings.json) {
    std::printf(
        "{\"gb_per_s\": %.4f, \"block_bytes\": %llu, \"depth\": %u, \"seconds\": %.3f, \"requests\": %llu, "
        "\"failed\": %llu, "
        "\"latency_us_mean\": %.1f, \"engine\": \"%s\", \"direct\": %s, \"registered_buffers\": %s, "
        "\"huge_pages\": %s, \"reads\": %llu, "
        "\"depth_max\": %u}\n",
        gigabytes, static_cast<unsigned long long>(settings.block_bytes), settings.depth, measured.seconds,
        static_cast<unsigned long long>(measured.n_reads), static_cast<unsigned long long>(measured.n_failed),
        latency_us, stats.engine.c_str(), stats.direct ? "true" : "false",
        stats.registered_buffers ? "true" : "false", huge_pages ? "true" : "false",
        static_cast<unsigned long long>(stats.reads), stats.depth_max);
    return;
  }
  std::printf("%.3f GB/s, %.1f us a request; %s, %s, buffers %s%s%s\n", gigabytes, latency_us,
              stats.engine.c_str(), stats.direct ? "O_DIRECT" : "page cache",
              stats.registered_buffers ? "registered" : "not registered", huge_pages ? ", huge pages" : "",
              measured.n_failed > 0 ? ", SOME READS FAILED" : "");
  if (!stats.fallback_reason.empty()) std::printf("fallback: %s\n", stats.fallback_reason.c_str());
}

int fail(const Fault& fault) {
  std::fprintf(stderr, "ssd_bench: %s\n", fault.text.c_str());
  return 1;
}

int run(const Settings& settings) {
  UniqueFd fd(::open(settings.file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return fail(system_fault("open " + settings.file, errno));
  const Result<FileIdentity> identity = file_identity(fd.get());
  if (!identity) return fail(identity.error());
  if (identity->bytes < settings.block_bytes) {
    return fail(Fault{FaultCode::kInvalid, settings.file + " is smaller than one block"});
  }
  // What a daemon would read into.
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> pool =
      device->create_pool("bench", settings.depth * settings.block_bytes + kHugePageBytes);
  if (!pool) return fail(pool.error());

  SsdOptions options;
  options.engine = settings.engine;
  options.direct = !settings.buffered;
  options.queue_depth = settings.depth < 32 ? 32 : settings.depth;
  Result<std::unique_ptr<SsdTier>> tier = make_ssd_tier(options);
  if (!tier) return fail(tier.error());
  Result<FileId> file = (*tier)->add_file(std::move(fd));
  if (!file) return fail(file.error());
  (*tier)->register_region((*pool)->host_view());

  Load load(settings, **tier, *file, identity->bytes, (*pool)->host_view().data());
  (void)load.run(0.3);  // populates the pool
  const Measured measured = load.run(settings.seconds);
  print(settings, measured, (*tier)->stats());
  return measured.n_failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace moecached

int main(int argc, char** argv) {
  const std::optional<moecached::Settings> settings = moecached::parse(argc, argv);
  return settings ? moecached::run(*settings) : 2;
}
