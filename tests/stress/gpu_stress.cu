// Reads slots of a model on a GPU as fast as it can while the daemon moves experts between them, and checks
// every byte. Each lane is a thread with a stream, and each of its epochs does what a graph of an engine
// does: one kernel looks slots up in the table, another one, a little later, reads every part of those slots;
// then done_event and submit. Content is compared by a 64-bit checksum of every (layer, expert, part), taken
// from the file beforehand. Routing is skewed and its favourites wander, so that there is something to
// promote.
//
//   gpu_stress [--socket PATH] [--seconds N | --decisions N] [--lanes N] [--layers N] [--delay-us N]
//              [--device N] [--twin] [--flip] [MODEL.gguf ...]
//
// --decisions: where it ends, in place of a time; one is a token in a layer. The GPU's memory in use must be
// in the last quarter of the time what it was in the second: nothing else may start on the GPU meanwhile.
// --device: CUDA's number of the GPU. --twin: the daemon and this program have a driver that shows the GPU
// twice (tests/support/one_gpu_twice), and this is the second one. --layers: of one epoch. --delay-us:
// longest pause between look-up and read. --flip: spoils one expectation of each layer, to show that a wrong
// byte is found. MODEL: else $MOECACHED_STRESS_MODEL; shards in order. After the daemon's death it goes on
// with the last table and moves to the next daemon when there is one. Exit status: 0, 1 wrong bytes, memory
// that grows or an error, 77 no GPU or no model (skipped).
#include <cuda_runtime.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "moecached/moecached.h"

namespace {

constexpr int kSkipped = 77;
constexpr int kPartsMax = 8;
constexpr int kThreads = 256;
constexpr int kReportsMax = 16;
constexpr std::uint32_t kPrefillTokens = 32;
constexpr std::uint32_t kInFlight = 2;     // epochs of a lane that are launched and not done
constexpr std::size_t kGrowthMaxMib = 32;  // of the GPU's memory in use

using Word = unsigned long long;

#define CUDA_OK(call)                                                                                 \
  do {                                                                                                \
    const cudaError_t result = (call);                                                                \
    if (result != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(result)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, moecached_last_error());
  std::exit(1);
}

struct LayerView {  // what the kernels need of a layer
  const int* table;
  std::uint32_t n_experts;
  std::uint32_t n_parts;
  std::uint32_t n_slots;          // scratch slots included
  std::uint32_t first_host_slot;  // n_slots, if none is
  std::uint32_t all_resident;
  std::uint32_t by_expert;  // of the log: slots are experts in host memory
  std::uint32_t expected;   // first checksum: expected[expert * n_parts + part]
  const unsigned char* window[kPartsMax];
  Word expert_bytes[kPartsMax];
};

struct Report {
  std::uint32_t lane, layer, expert, part;
  int slot;
  Word epoch, got, want;
};

struct Counters {
  Word slot_reads, device_reads, host_reads, fetched_reads, wrong, bad_slots;
  unsigned n_reports;
  Report reports[kReportsMax];
};

struct EpochShape {
  Word seed, epoch, drift;
  std::uint32_t lane, first_layer, n_model_layers, n_tokens, top_k, pitch;  // pitch: ints of a row of slots
  std::uint32_t first_row;                                                  // that read_slots reads
};

__host__ __device__ Word mix(Word x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Sum over bytes and their places: any order of summation gives the same, no other content does (nearly). All
// threads of the block take part; the result is in thread 0.
__device__ Word checksum(const unsigned char* bytes, Word n) {
  __shared__ Word partial[kThreads];
  Word sum = 0;
  if ((n & 7) == 0) {  // then every slot is aligned as well
    const auto* words = reinterpret_cast<const volatile Word*>(bytes);
    for (Word i = threadIdx.x; i < n / 8; i += blockDim.x) sum += mix(words[i] ^ (i * 0x2545f4914f6cdd1dull));
  } else {
    for (Word i = threadIdx.x; i < n; i += blockDim.x) {
      sum += mix(reinterpret_cast<const volatile unsigned char*>(bytes)[i] ^ (i * 0x2545f4914f6cdd1dull));
    }
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const Word result = partial[0];
  __syncthreads();
  return result;
}

// expected[expert] of one part, of experts that lie one behind the other. Aligned as slots are: a part of a
// size that is no multiple of 8 is summed by bytes in both places.
__global__ void checksum_experts(const unsigned char* bytes, Word expert_bytes, Word* expected,
                                 std::uint32_t stride) {
  const Word sum = checksum(bytes + blockIdx.x * expert_bytes, expert_bytes);
  if (threadIdx.x == 0) expected[blockIdx.x * stride] = sum;
}

__device__ std::uint32_t expert_of(const EpochShape& shape, std::uint32_t layer, std::uint32_t index,
                                   std::uint32_t n_experts) {
  const double x = static_cast<double>(mix(shape.seed ^ mix(shape.epoch * 4096 + layer) ^ index) >> 11) /
                   9007199254740992.0;
  // Few are asked for often; which ones, `drift` moves slowly through the layer.
  const std::uint32_t rank = static_cast<std::uint32_t>(x * x * x * n_experts);
  return static_cast<std::uint32_t>((rank * 7919ull + mix(layer) % n_experts + shape.drift) % n_experts);
}

__device__ std::uint32_t layer_of(const EpochShape& shape, std::uint32_t row) {
  return (shape.first_layer + row) % shape.n_model_layers;
}

// As GET_ROWS on the table. One block a layer.
__global__ void look_up(EpochShape shape, const LayerView* layers, int* slots, int* experts) {
  const std::uint32_t layer = layer_of(shape, blockIdx.x);
  const LayerView& view = layers[layer];
  for (std::uint32_t i = threadIdx.x; i < shape.n_tokens * shape.top_k; i += blockDim.x) {
    const std::uint32_t expert = expert_of(shape, layer, i, view.n_experts);
    const int slot = view.all_resident != 0 ? static_cast<int>(expert)
                                            : reinterpret_cast<const volatile int*>(view.table)[expert];
    slots[blockIdx.x * shape.pitch + i] = slot;
    experts[blockIdx.x * shape.pitch + i] = static_cast<int>(expert);
  }
}

__global__ void pause_ns(Word ns) {
  Word begin = 0, now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

// As MUL_MAT_ID of every part. Block (i, row): the i-th slot of a row.
__global__ void read_slots(EpochShape shape, const LayerView* layers, const int* slots, const int* experts,
                           const Word* expected, Counters* counters) {
  const std::uint32_t row = shape.first_row + blockIdx.y;
  const std::uint32_t layer = layer_of(shape, row);
  const LayerView& view = layers[layer];
  const int slot = slots[row * shape.pitch + blockIdx.x];
  const std::uint32_t expert = static_cast<std::uint32_t>(experts[row * shape.pitch + blockIdx.x]);
  if (slot < 0 || static_cast<std::uint32_t>(slot) >= view.n_slots) {
    if (threadIdx.x == 0) {
      atomicAdd(&counters->bad_slots, 1ull);
      atomicAdd(&counters->wrong, 1ull);
    }
    return;
  }
  bool wrong = false;
  for (std::uint32_t part = 0; part < view.n_parts; ++part) {
    const Word got = checksum(view.window[part] + static_cast<Word>(slot) * view.expert_bytes[part],
                              view.expert_bytes[part]);
    const Word want = expected[view.expected + expert * view.n_parts + part];
    if (threadIdx.x != 0 || got == want) continue;
    wrong = true;
    const unsigned n = atomicAdd(&counters->n_reports, 1u);
    if (n < kReportsMax)
      counters->reports[n] = {shape.lane, layer, expert, part, slot, shape.epoch, got, want};
  }
  if (threadIdx.x != 0) return;
  atomicAdd(&counters->slot_reads, 1ull);
  const std::uint32_t at = static_cast<std::uint32_t>(slot);
  atomicAdd(at < view.first_host_slot                    ? &counters->device_reads
            : at < view.first_host_slot + view.n_experts ? &counters->host_reads
                                                         : &counters->fetched_reads,
            1ull);
  if (wrong) atomicAdd(&counters->wrong, 1ull);
}

struct Options {
  const char* socket = nullptr;
  double seconds = 10;
  Word decisions = 0;  // to end at; 0: seconds count
  std::uint32_t lanes = 3;
  std::uint32_t layers = 8;
  std::uint32_t delay_us = 100;
  bool flip = false, twin = false;
  int device = 0;
  std::vector<const char*> paths;
};

struct Stress {
  Options options;
  moecached_session* session = nullptr;
  moecached_gpu_model* model = nullptr;
  std::uint32_t n_layers = 0, top_k = 0, n_experts_max = 0;
  std::vector<std::uint32_t> expected_first;  // of each layer
  Word* expected = nullptr;                   // device
  Counters* counters = nullptr;               // device
  std::atomic<bool> stop{false}, pause{false};
  std::atomic<std::uint32_t> n_paused{0}, n_running{0};
  std::atomic<Word> epochs{0}, decisions{0};
};

std::vector<LayerView> take_views(const Stress& stress) {
  std::vector<LayerView> views(stress.n_layers);
  for (std::uint32_t l = 0; l < stress.n_layers; ++l) {
    moecached_gpu_layer_info info{};
    if (moecached_gpu_model_layer(stress.model, l, &info) != MOECACHED_OK) die("layer");
    LayerView& view = views[l];
    view = {};
    view.table = reinterpret_cast<const int*>(info.table);
    view.n_experts = info.n_experts;
    view.n_parts = info.n_parts;
    view.n_slots = std::max(info.n_slots, info.n_slots_fetched);
    view.all_resident = info.all_resident;
    view.by_expert = info.by_expert;
    view.first_host_slot = info.all_resident != 0 ? info.n_slots : info.n_slots - info.n_experts;
    view.expected = stress.expected_first[l];
    for (std::uint32_t p = 0; p < info.n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      if (moecached_gpu_model_part(stress.model, l, p, &part, &window) != MOECACHED_OK) die("part");
      view.window[p] = reinterpret_cast<const unsigned char*>(window);
      view.expert_bytes[p] = part.expert_bytes;
    }
  }
  return views;
}

// Checksums of the whole file's experts, part by part.
void take_expectations(Stress& stress) {
  std::uint32_t n = 0;
  for (std::uint32_t l = 0; l < stress.n_layers; ++l) {
    moecached_gpu_layer_info info{};
    if (moecached_gpu_model_layer(stress.model, l, &info) != MOECACHED_OK) die("layer");
    if (info.n_parts > kPartsMax) die("too many parts");
    stress.expected_first.push_back(n);
    stress.n_experts_max = std::max(stress.n_experts_max, info.n_experts);
    n += info.n_experts * info.n_parts;
  }
  CUDA_OK(cudaMalloc(&stress.expected, n * sizeof(Word)));
  std::vector<int> files;
  for (const char* path : stress.options.paths) {
    files.push_back(::open(path, O_RDONLY | O_CLOEXEC));
    if (files.back() < 0) die(path);
  }
  for (std::uint32_t l = 0; l < stress.n_layers; ++l) {
    moecached_gpu_layer_info info{};
    if (moecached_gpu_model_layer(stress.model, l, &info) != MOECACHED_OK) die("layer");
    for (std::uint32_t p = 0; p < info.n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      if (moecached_gpu_model_part(stress.model, l, p, &part, &window) != MOECACHED_OK) die("part");
      const std::size_t bytes = part.expert_bytes * info.n_experts;
      std::vector<char> content(bytes);
      for (std::size_t at = 0; at < bytes;) {
        const std::uint64_t expert = at / part.expert_bytes, within = at % part.expert_bytes;
        std::uint32_t file = 0;
        std::uint64_t offset = 0;
        if (moecached_gpu_model_locate(stress.model, l, p, static_cast<std::uint32_t>(expert), &file,
                                       &offset) != MOECACHED_OK) {
          die("locate");
        }
        const ssize_t got = ::pread(files[file], content.data() + at, part.expert_bytes - within,
                                    static_cast<off_t>(offset + within));
        if (got <= 0) die("cannot read the model");
        at += static_cast<std::size_t>(got);
      }
      unsigned char* device = nullptr;
      CUDA_OK(cudaMalloc(&device, bytes));
      CUDA_OK(cudaMemcpy(device, content.data(), bytes, cudaMemcpyHostToDevice));
      checksum_experts<<<info.n_experts, kThreads>>>(
          device, part.expert_bytes, stress.expected + stress.expected_first[l] + p, info.n_parts);
      CUDA_OK(cudaGetLastError());
      CUDA_OK(cudaFree(device));  // waits for the kernel
    }
    if (stress.options.flip) {
      Word* const one = stress.expected + stress.expected_first[l];
      Word value = 0;
      CUDA_OK(cudaMemcpy(&value, one, sizeof value, cudaMemcpyDeviceToHost));
      value ^= 1;
      CUDA_OK(cudaMemcpy(one, &value, sizeof value, cudaMemcpyHostToDevice));
    }
  }
  CUDA_OK(cudaDeviceSynchronize());
  for (const int file : files) ::close(file);
}

void run_lane(Stress& stress, std::uint32_t index) {
  CUDA_OK(cudaSetDevice(stress.options.device));
  moecached_gpu_lane* lane = nullptr;
  if (moecached_gpu_lane_open(stress.model, &lane) != MOECACHED_OK) die("lane");
  cudaStream_t stream = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t done[kInFlight], logged[kInFlight];
  int *slots[kInFlight], *experts[kInFlight], *fetched[kInFlight];
  const std::uint32_t rows_max = std::min(stress.options.layers, stress.n_layers);
  const std::uint32_t pitch = kPrefillTokens * stress.top_k;
  for (std::uint32_t i = 0; i < kInFlight; ++i) {
    CUDA_OK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    CUDA_OK(cudaEventCreateWithFlags(&logged[i], cudaEventDisableTiming));
    CUDA_OK(cudaMalloc(&slots[i], rows_max * pitch * sizeof(int)));
    CUDA_OK(cudaMalloc(&experts[i], rows_max * pitch * sizeof(int)));
    CUDA_OK(cudaMalloc(&fetched[i], rows_max * pitch * sizeof(int)));
  }
  LayerView* views = nullptr;
  std::vector<LayerView> fresh;
  CUDA_OK(cudaMalloc(&views, stress.n_layers * sizeof(LayerView)));
  std::uint64_t generation = 0;
  std::uint32_t n_scratch = 0;  // one of the lanes gets scratch slots, and fetches into them
  Word random = mix(index + 1);
  const auto next = [&random] { return random = mix(random); };

  for (Word epoch = 0; !stress.stop.load(); ++epoch) {
    if (stress.pause.load()) {
      ++stress.n_paused;
      while (stress.pause.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      --stress.n_paused;
    }
    const std::uint32_t turn = static_cast<std::uint32_t>(epoch % kInFlight);
    CUDA_OK(cudaEventSynchronize(done[turn]));
    if (const moecached_status status = moecached_gpu_lane_begin(lane); status != MOECACHED_OK) {
      if (status != MOECACHED_E_UNAVAILABLE) die("begin");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // until there is a daemon again
      continue;
    }
    // Behind begin(): what it found is in these infos.
    const std::uint64_t now = moecached_gpu_model_generation(stress.model);
    if (now != generation) {
      if (moecached_gpu_lane_scratch(lane, &n_scratch) != MOECACHED_OK) die("scratch");
      // Asked for one by one: taken again until no other lane took over new shapes in between.
      do {
        generation = moecached_gpu_model_generation(stress.model);
        fresh = take_views(stress);
      } while (generation != moecached_gpu_model_generation(stress.model));
      CUDA_OK(cudaStreamSynchronize(stream));
      // In the lane's own stream: a plain copy of so little returns before it is done, and this stream does
      // not wait for the one that it is on.
      CUDA_OK(cudaMemcpyAsync(views, fresh.data(), fresh.size() * sizeof(LayerView), cudaMemcpyHostToDevice,
                              stream));
      CUDA_OK(cudaStreamSynchronize(stream));
    }
    const bool prefill = epoch % 50 == 49;
    EpochShape shape{};
    shape.seed = next();
    shape.epoch = epoch;
    shape.drift = stress.epochs.fetch_add(1) / 400;
    shape.lane = index;
    shape.first_layer = static_cast<std::uint32_t>(next() % stress.n_layers);
    shape.n_model_layers = stress.n_layers;
    shape.n_tokens = prefill ? kPrefillTokens : 1 + static_cast<std::uint32_t>(next() % 4);
    shape.top_k = stress.top_k;
    shape.pitch = pitch;
    const std::uint32_t rows = prefill ? std::min(rows_max, 2u) : rows_max;
    std::vector<std::uint16_t> layers(rows);
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::uint32_t layer = (shape.first_layer + i) % stress.n_layers;
      layers[i] =
          static_cast<std::uint16_t>(layer | (fresh[layer].by_expert != 0 ? MOECACHED_GPU_BY_EXPERT : 0));
    }

    CUDA_OK(cudaStreamWaitEvent(stream, logged[turn], 0));  // this lane's log has read the buffer
    look_up<<<rows, kThreads, 0, stream>>>(shape, views, slots[turn], experts[turn]);
    if (stress.options.delay_us > 0)
      pause_ns<<<1, 1, 0, stream>>>(next() % (stress.options.delay_us * 1000ull));
    const std::uint32_t n_ids = shape.n_tokens * shape.top_k;
    if (n_ids > n_scratch) {
      read_slots<<<dim3(n_ids, rows), kThreads, 0, stream>>>(shape, views, slots[turn], experts[turn],
                                                             stress.expected, stress.counters);
    }
    for (std::uint32_t row = 0; row < rows && n_ids <= n_scratch; ++row) {
      // Layer by layer, as a graph does: they share the scratch slots. Those of an all-resident layer are
      // looked up by nobody.
      const bool whole = fresh[(shape.first_layer + row) % stress.n_layers].all_resident != 0;
      moecached_gpu_fetch fetch{};
      fetch.stream = stream;
      fetch.slots = reinterpret_cast<std::uint64_t>(slots[turn] + row * pitch);
      fetch.fetched = reinterpret_cast<std::uint64_t>(fetched[turn] + row * pitch);
      fetch.n_ids = n_ids;
      fetch.layer = layers[row];
      if (!whole && moecached_gpu_lane_fetch(lane, &fetch) != MOECACHED_OK) die("fetch");
      shape.first_row = row;
      read_slots<<<n_ids, kThreads, 0, stream>>>(shape, views, whole ? slots[turn] : fetched[turn],
                                                 experts[turn], stress.expected, stress.counters);
    }
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaEventRecord(done[turn], stream));
    moecached_gpu_submit submit{};
    submit.done_event = done[turn];
    submit.logged_event = logged[turn];
    submit.slots = reinterpret_cast<std::uint64_t>(slots[turn]);
    submit.layer_pitch_bytes = pitch * sizeof(int);
    submit.layers = layers.data();
    submit.n_layers = rows;
    submit.n_tokens = shape.n_tokens;
    submit.is_prefill = prefill ? 1 : 0;
    if (moecached_gpu_lane_submit(lane, &submit) != MOECACHED_OK) die("submit");
    stress.decisions += Word{shape.n_tokens} * rows;
  }
  CUDA_OK(cudaStreamSynchronize(stream));
  moecached_gpu_lane_close(lane);
  --stress.n_running;
}

// Lanes stand between submit and begin while the session moves.
void reconnect(Stress& stress) {
  stress.pause = true;
  while (stress.n_paused.load() < stress.n_running.load())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const moecached_status status = moecached_session_reconnect(stress.session);
  std::printf("daemon gone: %s\n", status == MOECACHED_OK ? "moved to the next one" : moecached_last_error());
  stress.pause = false;
}

std::size_t device_mib_in_use() {
  std::size_t free = 0, total = 0;
  CUDA_OK(cudaMemGetInfo(&free, &total));
  return (total - free) >> 20;
}

bool is_flat(const std::vector<std::size_t>& mib_in_use) {
  const auto most = [&mib_in_use](std::size_t quarter) {
    const std::size_t first = mib_in_use.size() * quarter / 4, last = mib_in_use.size() * (quarter + 1) / 4;
    return first == last ? 0
                         : *std::max_element(mib_in_use.begin() + static_cast<std::ptrdiff_t>(first),
                                             mib_in_use.begin() + static_cast<std::ptrdiff_t>(last));
  };
  const std::size_t before = most(1), after = most(3);
  const bool flat = after <= before + kGrowthMaxMib;
  std::printf("device memory in use: second quarter %zu MiB, last quarter %zu MiB: %s\n", before, after,
              flat ? "flat" : "grows");
  return flat;
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--flip") {
      options->flip = true;
      continue;
    }
    if (word == "--twin") {
      options->twin = true;
      continue;
    }
    if (word.rfind("--", 0) != 0) {
      options->paths.push_back(argv[i]);
      continue;
    }
    if (++i == argc) return false;
    if (word == "--socket")
      options->socket = argv[i];
    else if (word == "--seconds")
      options->seconds = std::atof(argv[i]);
    else if (word == "--decisions")
      options->decisions = std::strtoull(argv[i], nullptr, 10);
    else if (word == "--lanes")
      options->lanes = static_cast<std::uint32_t>(std::atoi(argv[i]));
    else if (word == "--layers")
      options->layers = static_cast<std::uint32_t>(std::atoi(argv[i]));
    else if (word == "--device")
      options->device = std::atoi(argv[i]);
    else if (word == "--delay-us")
      options->delay_us = static_cast<std::uint32_t>(std::atoi(argv[i]));
    else
      return false;
  }
  if (options->paths.empty() && std::getenv("MOECACHED_STRESS_MODEL") != nullptr) {
    options->paths.push_back(std::getenv("MOECACHED_STRESS_MODEL"));
  }
  return options->lanes > 0 && options->layers > 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Stress stress;
  if (!parse(argc, argv, &stress.options)) {
    std::fprintf(stderr, "see the top of gpu_stress.cu for its options\n");
    return 1;
  }
  int n_devices = 0;
  if (stress.options.paths.empty() || cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::printf("skipped: no GPU, or no model given\n");
    return kSkipped;
  }
  CUDA_OK(cudaSetDevice(stress.options.device));
  CUDA_OK(cudaFree(nullptr));
  cudaDeviceProp properties{};
  CUDA_OK(cudaGetDeviceProperties(&properties, stress.options.device));
  if (stress.options.twin) properties.uuid.bytes[15] ^= 1;
  if (moecached_session_open(stress.options.socket, "gpu_stress", &stress.session) != MOECACHED_OK)
    die("session");
  if (moecached_gpu_model_open(stress.session, stress.options.paths.data(), stress.options.paths.size(),
                               reinterpret_cast<const std::uint8_t*>(properties.uuid.bytes),
                               &stress.model) != MOECACHED_OK) {
    die("model");
  }
  stress.n_layers = moecached_gpu_model_layers(stress.model);
  stress.top_k = moecached_gpu_model_expert_used(stress.model);
  CUDA_OK(cudaMalloc(&stress.counters, sizeof(Counters)));
  CUDA_OK(cudaMemset(stress.counters, 0, sizeof(Counters)));
  take_expectations(stress);
  const Word goal = stress.options.decisions;
  const std::string until = goal > 0 ? std::to_string(goal) + " decisions"
                                     : std::to_string(std::lround(stress.options.seconds)) + " s";
  std::printf("%s: %u layers, up to %u experts, top %u; %u lanes for %s\n", properties.name, stress.n_layers,
              stress.n_experts_max, stress.top_k, stress.options.lanes, until.c_str());

  std::vector<std::thread> threads;
  stress.n_running = stress.options.lanes;
  for (std::uint32_t i = 0; i < stress.options.lanes; ++i)
    threads.emplace_back(run_lane, std::ref(stress), i);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(stress.options.seconds);
  std::vector<std::size_t> mib_in_use;
  while (goal > 0 ? stress.decisions < goal : std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    mib_in_use.push_back(device_mib_in_use());
    if (moecached_session_connected(stress.session) == 0) reconnect(stress);
  }
  stress.stop = true;
  for (std::thread& thread : threads) thread.join();

  Counters seen{};
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemcpy(&seen, stress.counters, sizeof seen, cudaMemcpyDeviceToHost));
  for (unsigned i = 0; i < std::min<unsigned>(seen.n_reports, kReportsMax); ++i) {
    const Report& report = seen.reports[i];
    std::printf("wrong: lane %u epoch %llu layer %u expert %u part %u slot %d: %016llx, not %016llx\n",
                report.lane, report.epoch, report.layer, report.expert, report.part, report.slot, report.got,
                report.want);
  }
  const bool flat = is_flat(mib_in_use);
  std::printf(
      "decisions %llu epochs %llu slot_reads %llu device %llu host %llu fetched %llu bad_slots %llu wrong "
      "%llu\n",
      stress.decisions.load(), stress.epochs.load(), seen.slot_reads, seen.device_reads, seen.host_reads,
      seen.fetched_reads, seen.bad_slots, seen.wrong);
  moecached_gpu_model_close(stress.model);
  moecached_session_close(stress.session);
  return seen.wrong == 0 && seen.slot_reads > 0 && flat ? 0 : 1;
}
