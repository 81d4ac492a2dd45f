// How fast the daemon's copy queue fills device slots, beside one large copy: jobs of a few pieces, as an
// expert is, kept outstanding in the number that the daemon keeps. The copies' sources lie in order, as when
// a model is filled, or anywhere, as in promotions.
//
//   gpu_copy_bench [--host 4GiB] [--piece 903168] [--pieces 3] [--seconds 1]
#include <poll.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "daemon/platform/clock.h"
#include "daemon/platform/gpu.h"

namespace moecached {
namespace {

struct Settings {
  std::uint64_t host_bytes = 4ull << 30;
  std::uint64_t piece_bytes = 903168;  // a Q4_K part of 768 x 2048
  std::uint32_t n_pieces = 3;
  double seconds = 1;
};

struct Memory {
  std::unique_ptr<GpuHostMemory> host;
  std::unique_ptr<GpuRange> device;
  std::uint64_t device_bytes = 0;
};

Result<Memory> allocate(Gpu& gpu, const Settings& settings) {
  Memory memory;
  auto host = gpu.create_host_memory(settings.host_bytes);
  if (!host) return std::move(host).error();
  memory.host = *std::move(host);
  memory.device_bytes = 1ull << 30;
  auto device = gpu.reserve(memory.device_bytes);
  if (!device) return std::move(device).error();
  memory.device = *std::move(device);
  if (Status grown = memory.device->grow(0, memory.device_bytes); !grown) return std::move(grown).error();
  return memory;
}

// Bytes per second with `outstanding` jobs at a time.
Result<double> measure(GpuQueue& queue, const Memory& memory, const Settings& settings,
                       std::size_t outstanding, bool in_order) {
  const std::uint64_t stride = (settings.piece_bytes + 255) / 256 * 256;
  const std::uint64_t n_sources = memory.host->bytes().size() / stride;
  const std::uint64_t n_destinations = memory.device_bytes / stride;
  std::mt19937_64 random(1);
  std::uint64_t next = 0, submitted = 0, finished = 0;
  std::vector<GpuQueue::Done> done;
  const std::uint64_t begin = monotonic_ns();
  const auto end = begin + static_cast<std::uint64_t>(settings.seconds * 1e9);
  std::uint64_t now = begin;
  while (now < end || finished < submitted) {
    while (now < end && submitted - finished < outstanding) {
      GpuQueue::Job job;
      job.n_copies = settings.n_pieces;
      for (std::uint32_t i = 0; i < settings.n_pieces; ++i) {
        // Parts are windows of their own: the pieces of an expert are far apart.
        const std::uint64_t third = n_sources / settings.n_pieces;
        const std::uint64_t source = i * third + (in_order ? next : random()) % third;
        job.copies[i] = {.destination = memory.device->address() + (next + i * 17) % n_destinations * stride,
                         .source = memory.host->bytes().data() + source * stride,
                         .bytes = settings.piece_bytes};
      }
      ++next;
      ++submitted;
      queue.submit(std::move(job));
    }
    pollfd wake{.fd = queue.event_fd(), .events = POLLIN, .revents = 0};
    ::poll(&wake, 1, 100);
    done.clear();
    queue.poll(&done);
    for (const GpuQueue::Done& one : done) {
      if (!one.ok) return Fault{FaultCode::kSystem, "a copy failed"};
    }
    finished += done.size();
    now = monotonic_ns();
  }
  return static_cast<double>(finished * settings.n_pieces * settings.piece_bytes) /
         (static_cast<double>(now - begin) * 1e-9);
}

Status run(Gpu& gpu, const Settings& settings) {
  auto link = gpu.measure_copy_rate();
  if (!link) return std::move(link).error();
  std::printf("%s: one copy of 64 MiB %.1f GB/s\n", gpu.name().c_str(), *link / 1e9);
  auto memory = allocate(gpu, settings);
  if (!memory) return std::move(memory).error();
  auto queue = gpu.create_queue();
  if (!queue) return std::move(queue).error();
  std::printf("%u pieces of %llu bytes a job%s\n", settings.n_pieces,
              static_cast<unsigned long long>(settings.piece_bytes),
              gpu.host_memory_fallback().empty() ? "" : "; memory is a registered memfd");
  std::printf("%-12s %10s %8s %10s %8s\n", "outstanding", "in order", "of link", "anywhere", "of link");
  for (const std::size_t outstanding : {1, 2, 4, 8, 16, 48, 96, 192}) {
    double rates[2] = {};
    for (const bool in_order : {true, false}) {
      auto rate = measure(**queue, *memory, settings, outstanding, in_order);
      if (!rate) return std::move(rate).error();
      rates[in_order ? 0 : 1] = *rate;
    }
    std::printf("%-12zu %10.1f %8.3f %10.1f %8.3f\n", outstanding, rates[0] / 1e9, rates[0] / *link,
                rates[1] / 1e9, rates[1] / *link);
  }
  return ok();
}

}  // namespace
}  // namespace moecached

int main(int argc, char** argv) {
  using namespace moecached;
  Settings settings;
  CLI::App app("How fast the daemon's copy queue fills device slots.");
  app.add_option("--host", settings.host_bytes, "pinned memory to copy from")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--piece", settings.piece_bytes, "bytes of a piece")->check(CLI::Range(256u, 64u << 20));
  app.add_option("--pieces", settings.n_pieces, "pieces of a job")
      ->check(CLI::Range(1u, static_cast<unsigned>(GpuQueue::kCopiesMax)));
  app.add_option("--seconds", settings.seconds, "of each measurement")->check(CLI::Range(0.05, 60.0));
  CLI11_PARSE(app, argc, argv);
  std::string reason;
  const auto gpus = list_gpus(&reason);
  if (gpus.empty()) {
    std::fprintf(stderr, "gpu_copy_bench: no GPU: %s\n", reason.c_str());
    return 1;
  }
  if (Status done = run(*gpus.front(), settings); !done) {
    std::fprintf(stderr, "gpu_copy_bench: %s\n", done.error().text.c_str());
    return 1;
  }
  return 0;
}
