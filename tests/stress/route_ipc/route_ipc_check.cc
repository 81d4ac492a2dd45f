// A client that routes over gRPC and reads experts in device memory by a 64-byte CUDA IPC handle, with plain
// calls of the CUDA runtime; compares every byte of every answer with the model's file. On a machine with a
// GPU, with a daemon of its own and all that can be told of it:
//
//   python3 tests/integration/route_ipc_test.py
//
// By itself, at a running daemon (--control-route), whose two sockets lie in DIRECTORY:
//
//   route_ipc_check DIRECTORY MODEL.gguf [--decisions 2000] [--streams 2] [--device 0]
//
// It registers the model on that GPU. Prints counts. Exit status: 0, 1 wrong bytes, 2 an error, 77 no GPU
// (skipped).
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/control/v1/unix_target.h"
#include "tests/stress/route_ipc/device_reader.h"
#include "tests/support/route_client.h"

namespace {

using moecached::test::RouteClient;
namespace v1 = moecached::control::v1;

constexpr std::uint32_t kTokensMax = 4;

struct Options {
  std::string directory, model;
  int decisions = 2000, streams = 2, device = 0;
};

struct Counts {
  std::atomic<std::uint64_t> decisions = 0, experts = 0, from_ram = 0, bytes = 0, wrong_bytes = 0, ns = 0;
};

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "route_ipc_check: %s\n", text.c_str());
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    int* const number = word == "--decisions" ? &options.decisions
                        : word == "--streams" ? &options.streams
                        : word == "--device"  ? &options.device
                                              : nullptr;
    if (number == nullptr) {
      places.push_back(word);
    } else if (++i < argc) {
      *number = std::atoi(argv[i]);
    }
  }
  if (places.size() != 2 || options.decisions < 1 || options.streams < 1)
    die("usage: route_ipc_check DIRECTORY MODEL.gguf [--decisions N] [--streams N] [--device N]");
  options.directory = places[0];
  options.model = places[1];
  return options;
}

std::uint32_t register_model(const Options& options, const std::string& uuid) {
  const auto stub = v1::Control::NewStub(
      grpc::CreateChannel(moecached::control::unix_target(options.directory + "/control.sock"),
                          grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::RegisterModelRequest request;
  request.add_paths(options.model);
  request.set_device(uuid);
  v1::RegisterModelResponse response;
  const grpc::Status status = stub->RegisterModel(&context, request, &response);
  if (!status.ok()) die("the model was not registered: " + status.error_message());
  return response.model();
}

// k distinct experts a token; the first ones more often, so that some are worth a slot.
std::vector<std::uint32_t> draw(std::mt19937& random, std::uint32_t n_experts, std::uint32_t k,
                                std::uint32_t n_tokens) {
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<std::uint32_t> ids;
  for (std::uint32_t token = 0; token < n_tokens; ++token) {
    const auto first = static_cast<std::ptrdiff_t>(ids.size());
    while (ids.size() < static_cast<std::size_t>(first) + k) {
      const double x = unit(random);
      const auto id = std::min(static_cast<std::uint32_t>(x * x * n_experts), n_experts - 1);
      if (std::find(ids.begin() + first, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

class Stream {
 public:
  Stream(const Options& options, std::uint32_t model, int file, Counts& counts)
      : client_(options.directory + "/control.sock"), file_(file), counts_(counts) {
    v1::RouteOpen open;
    open.set_model(model);
    open.set_label("route_ipc_check");
    open.set_memory(v1::ROUTE_MEMORY_CUDA_IPC);
    open.set_experts(kTokensMax * 16);
    if (!client_.open(open)) die(client_.finish().error_message());
    reader_ = std::make_unique<DeviceReader>(client_.geometry().cuda().handle(), options.device);
  }
  void run(std::uint32_t seed, int n_decisions) {
    std::mt19937 random(seed);
    for (int i = 0; i < n_decisions; ++i) {
      const auto layer = static_cast<std::uint32_t>(i % client_.geometry().layers_size());
      const v1::RouteLayer& of = client_.geometry().layers(static_cast<int>(layer));
      const std::uint32_t n_tokens = i % 4 == 3 ? kTokensMax : 1;
      const std::vector<std::uint32_t> ids =
          draw(random, of.n_experts(), client_.geometry().n_expert_used(), n_tokens);
      const auto start = std::chrono::steady_clock::now();
      if (!client_.decide(layer, ids, n_tokens))
        die(client_.was_refused() ? "refused: " + client_.refused().text()
                                  : client_.finish().error_message());
      counts_.ns += static_cast<std::uint64_t>((std::chrono::steady_clock::now() - start).count());
      ++counts_.decisions;
      counts_.experts += client_.slots().n_distinct();
      counts_.from_ram += client_.slots().n_absent();
      std::map<std::uint32_t, std::uint32_t> slot_of;
      for (std::size_t k = 0; k < ids.size(); ++k)
        slot_of[ids[k]] = client_.slots().slots(static_cast<int>(k));
      for (const auto& [expert, slot] : slot_of) counts_.wrong_bytes += wrong_bytes(of, expert, slot);
    }
    // A comparison that could not tell experts apart would have found nothing either.
    const v1::RouteLayer& of = client_.geometry().layers(0);
    if (!client_.decide(0, {0, 1})) die("refused: " + client_.refused().text());
    if (wrong_bytes(of, 0, client_.slots().slots(1)) == 0) die("the comparison does not see a wrong expert");
  }

 private:
  std::uint64_t wrong_bytes(const v1::RouteLayer& of, std::uint32_t expert, std::uint32_t slot) {
    std::uint64_t wrong = 0;
    for (const v1::RoutePart& part : of.parts()) {
      seen_.resize(part.expert_bytes());
      expected_.resize(part.expert_bytes());
      reader_->read(of.window_offset() + slot * of.slot_stride() + part.slot_offset(), seen_.data(),
                    seen_.size());
      const auto at = static_cast<off_t>(part.file_offset() + expert * part.expert_bytes());
      if (::pread(file_, expected_.data(), expected_.size(), at) != static_cast<ssize_t>(expected_.size()))
        die("the model's file is too short");
      for (std::size_t i = 0; i < seen_.size(); ++i) wrong += seen_[i] != expected_[i] ? 1 : 0;
      counts_.bytes += seen_.size();
    }
    return wrong;
  }
  RouteClient client_;  // outlives the reader: the handle is closed before the stream ends
  int file_;
  Counts& counts_;
  std::unique_ptr<DeviceReader> reader_;
  std::vector<std::byte> seen_, expected_;
};

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const std::string uuid = uuid_of_gpu(options.device);
  if (uuid.empty()) {
    std::fprintf(stderr, "route_ipc_check: no GPU %d\n", options.device);
    return 77;
  }
  const int file = ::open(options.model.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) die("cannot open " + options.model);
  const std::uint32_t model = register_model(options, uuid);
  Counts counts;
  std::vector<std::thread> threads;
  for (int i = 0; i < options.streams; ++i) {
    threads.emplace_back([&, i] {
      Stream stream(options, model, file, counts);
      stream.run(static_cast<std::uint32_t>(i) + 1, options.decisions);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::close(file);
  std::printf(
      "%llu decisions on %s, %llu experts: from slots %llu, from RAM %llu; %llu bytes compared, wrong %llu; "
      "%.1f us a "
      "decision\n",
      static_cast<unsigned long long>(counts.decisions), uuid.c_str(),
      static_cast<unsigned long long>(counts.experts),
      static_cast<unsigned long long>(counts.experts - counts.from_ram),
      static_cast<unsigned long long>(counts.from_ram), static_cast<unsigned long long>(counts.bytes),
      static_cast<unsigned long long>(counts.wrong_bytes),
      static_cast<double>(counts.ns) / 1e3 / static_cast<double>(counts.decisions));
  return counts.wrong_bytes == 0 ? 0 : 1;
}
