/* moe_layer.c on a GPU: the MoE layers of a model for a few tokens, computed by kernels that look up at the
 * time they run where the daemon has each expert, in VRAM or in pinned RAM; and once more on a copy of the
 * file's bytes, with the same kernels.
 *
 *   nvcc -O2 moe_layer.cu -o moe_layer_gpu $(pkg-config --cflags --libs moecached)
 *   ./moe_layer_gpu model.gguf             # the daemon serves the GPU: [gpu] in moecached.toml
 *
 * CUDA alone: no framework. Exit status: 0 when all is equal, 1 when not, 2 on an error. */
#include <cuda_runtime.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "weights.h"

namespace {

// Device slots come behind the first graphs: it is computed on until some have served, but not for ever.
constexpr std::uint32_t kTokensMin = 500;
constexpr auto kTimeMax = std::chrono::seconds(30);
constexpr std::size_t kLayersMax = 4;  // of larger models the first ones: the copy of the file takes VRAM
constexpr std::uint32_t kPartsMax = 8;
constexpr int kThreads = 128;

[[noreturn]] void fail(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s\n", what, why);
  std::exit(2);
}
void check(moecached_status status, const char* what) {
  if (status != MOECACHED_OK) fail(what, moecached_last_error());
}
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(what, cudaGetErrorString(status));
}

void read_file(const char* path, std::uint64_t offset, unsigned char* to, std::uint64_t size) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  for (std::uint64_t got = 0; got < size;) {
    const ssize_t n = pread(fd, to + got, size - got, static_cast<off_t>(offset + got));
    if (n <= 0) fail(path, "cannot be read");
    got += static_cast<std::uint64_t>(n);
  }
  close(fd);
}

template <typename T>
T* device_array(std::size_t n) {
  T* array = nullptr;
  check(cudaMalloc(&array, n * sizeof(T)), "device memory");
  return array;
}

// What kernels need of a layer. Passed by value.
struct LayerView {
  moe_layer layer;
  const int* table;  // null: expert e is in slot e
  std::uint32_t n_parts;
  const unsigned char* window[kPartsMax];
  std::uint64_t expert_bytes[kPartsMax];
};

__device__ void find_parts(const LayerView& view, int slot, const unsigned char** base) {
  for (std::uint32_t p = 0; p < view.n_parts; ++p) base[p] = view.window[p] + slot * view.expert_bytes[p];
}

// The daemon may move an expert while the graph runs, so an epoch looks it up once and uses what it found:
// the slot it saw stays as it is until the epoch has ended.
__global__ void look_up(const int* table, const int* ids, int* slots) {
  slots[threadIdx.x] = table == nullptr ? ids[threadIdx.x] : table[ids[threadIdx.x]];
}

// Block k: the inner layer of expert k.
__global__ void compute_inner(LayerView view, const int* slots, const float* x, float* inner) {
  const unsigned char* base[kPartsMax];
  find_parts(view, slots[blockIdx.x], base);
  const std::uint64_t n = view.layer.gate.n_rows;
  for (std::uint64_t row = threadIdx.x; row < n; row += blockDim.x)
    inner[blockIdx.x * n + row] = inner_row(&view.layer, base, row, x);
}

// A thread a row: the sum over the experts is added up in one order, so that two runs give the same bits.
__global__ void compute_down(LayerView view, const int* slots, std::uint32_t n_experts, const float* inner,
                             float* y) {
  const std::uint64_t row = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
  if (row >= view.layer.down.n_rows) return;
  float sum = 0;
  for (std::uint32_t k = 0; k < n_experts; ++k) {
    const unsigned char* base[kPartsMax];
    find_parts(view, slots[k], base);
    sum += row_times(&view.layer.down, base, row, inner + k * view.layer.down.n_columns) /
           static_cast<float>(k + 2);
  }
  y[row] = sum;
}

void compute(const LayerView& view, const int* slots, std::uint32_t n_experts, const float* x, float* inner,
             float* y, cudaStream_t stream) {
  const std::uint64_t n_rows = view.layer.down.n_rows;
  compute_inner<<<n_experts, kThreads, 0, stream>>>(view, slots, x, inner);
  compute_down<<<static_cast<unsigned>((n_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      view, slots, n_experts, inner, y);
  check(cudaGetLastError(), "kernels");
}

struct Layer {
  moecached_gpu_layer_info info;
  moecached_part_info parts[kPartsMax];
  LayerView view;
};

std::vector<Layer> take_layers(moecached_gpu_model* model) {
  std::vector<Layer> layers(std::min<std::size_t>(moecached_gpu_model_layers(model), kLayersMax));
  for (std::uint32_t l = 0; l < layers.size(); ++l) {
    Layer& to = layers[l];
    check(moecached_gpu_model_layer(model, l, &to.info), "layer");
    to.view.table = to.info.all_resident != 0 ? nullptr : reinterpret_cast<const int*>(to.info.table);
    to.view.n_parts = to.info.n_parts;
    for (std::uint32_t p = 0; p < to.info.n_parts; ++p) {
      std::uint64_t window = 0;
      check(moecached_gpu_model_part(model, l, p, &to.parts[p], &window), "part");
      to.view.window[p] = reinterpret_cast<const unsigned char*>(window);
      to.view.expert_bytes[p] = to.parts[p].expert_bytes;
    }
    const char* why = describe_layer(to.parts, to.info.n_parts, &to.view.layer);
    if (why != nullptr) fail("this example cannot compute the model", why);
  }
  return layers;
}

// The experts of a layer as the files have them, in device memory of our own.
LayerView copy_of_file(moecached_gpu_model* model, char** paths, std::uint32_t l, const Layer& layer) {
  LayerView view = layer.view;
  view.table = nullptr;
  std::vector<unsigned char> bytes;
  for (std::uint32_t p = 0; p < view.n_parts; ++p) {
    const std::uint64_t size = layer.parts[p].expert_bytes;
    bytes.resize(size * layer.info.n_experts);
    for (std::uint32_t e = 0; e < layer.info.n_experts; ++e) {
      std::uint32_t file = 0;
      std::uint64_t offset = 0;
      check(moecached_gpu_model_locate(model, l, p, e, &file, &offset), "locate");
      read_file(paths[file], offset, bytes.data() + e * size, size);
    }
    unsigned char* copy = device_array<unsigned char>(bytes.size());
    check(cudaMemcpy(copy, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "copy");
    view.window[p] = copy;
  }
  return view;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("usage", "moe_layer_gpu model.gguf [further shards...]");
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "GPU");
  moecached_session* session = nullptr;
  moecached_gpu_model* model = nullptr;
  moecached_gpu_lane* lane = nullptr;
  check(moecached_session_open(nullptr, "moe_layer_gpu", &session), "no session");
  check(moecached_gpu_model_open(session, const_cast<const char* const*>(argv + 1),
                                 static_cast<std::size_t>(argc - 1),
                                 reinterpret_cast<const std::uint8_t*>(device.uuid.bytes), &model),
        "model refused");
  check(moecached_gpu_lane_open(model, &lane), "no lane");  // a lane is one stream of graphs

  const std::uint32_t top_k = moecached_gpu_model_expert_used(model);
  std::vector<Layer> layers = take_layers(model);  // sizes; where things are is asked within an epoch
  std::uint64_t generation = 0;
  std::vector<LayerView> of_file;
  std::uint64_t hidden = 0, inner_size = 0;
  for (std::uint32_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    of_file.push_back(copy_of_file(model, argv + 1, l, layer));
    hidden = std::max(hidden, layer.view.layer.down.n_rows);
    inner_size = std::max(inner_size, layer.view.layer.down.n_columns);
  }
  cudaStream_t stream = nullptr;
  cudaEvent_t done = nullptr, logged = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&logged, cudaEventDisableTiming), "event");
  int* ids = device_array<int>(layers.size() * top_k);
  int* slots = device_array<int>(layers.size() * top_k);
  float* x = device_array<float>(hidden);
  float* inner = device_array<float>(top_k * inner_size);
  float* y = device_array<float>(2 * layers.size() * hidden);  // of the slots, then of the file

  std::uint64_t n_device = 0, n_host = 0, n_different = 0;
  std::uint32_t token = 0;
  const auto start = std::chrono::steady_clock::now();
  for (; token < kTokensMin || (n_device == 0 && std::chrono::steady_clock::now() - start < kTimeMax);
       ++token) {
    std::vector<int> chosen;  // what a router would choose: distinct experts of each layer, shifted slowly
    for (std::uint32_t l = 0; l < layers.size(); ++l) {
      for (std::uint32_t k = 0; k < top_k; ++k)
        chosen.push_back(static_cast<int>((token / 50 + l + k) % layers[l].info.n_experts));
    }
    std::vector<float> token_x(hidden);
    for (std::uint64_t i = 0; i < hidden; ++i)
      token_x[i] = static_cast<float>((i * 7 + token * 13) % 31) / 16.0f - 1.0f;
    check(cudaMemcpyAsync(ids, chosen.data(), chosen.size() * sizeof(int), cudaMemcpyHostToDevice, stream),
          "ids");
    check(cudaMemcpyAsync(x, token_x.data(), hidden * sizeof(float), cudaMemcpyHostToDevice, stream), "x");

    // An epoch: slots that its kernels see stay as they are until it ends.
    check(moecached_gpu_lane_begin(lane), "begin");
    while (generation != moecached_gpu_model_generation(model)) {
      generation = moecached_gpu_model_generation(model);
      layers = take_layers(model);
    }
    std::vector<std::uint16_t> looked_up, whole;
    check(cudaStreamWaitEvent(stream, logged, 0), "event");  // the log of the epoch before reads `slots`
    for (std::uint32_t l = 0; l < layers.size(); ++l) {
      // Rows of the log: layers that were looked up, in order. The others are told apart, and use their ids
      // as slots.
      const bool is_whole = layers[l].info.all_resident != 0;
      const int* own = ids + l * top_k;
      int* row = slots + looked_up.size() * top_k;
      if (is_whole) {
        whole.push_back(static_cast<std::uint16_t>(l));
      } else {
        look_up<<<1, top_k, 0, stream>>>(layers[l].view.table, own, row);
        looked_up.push_back(
            static_cast<std::uint16_t>(l | (layers[l].info.by_expert != 0 ? MOECACHED_GPU_BY_EXPERT : 0)));
      }
      compute(layers[l].view, is_whole ? own : row, top_k, x, inner, y + l * hidden, stream);
    }
    check(cudaEventRecord(done, stream), "event");
    moecached_gpu_submit submit{};
    submit.done_event = done;
    submit.logged_event = logged;
    submit.slots = reinterpret_cast<std::uint64_t>(slots);
    submit.layer_pitch_bytes = top_k * sizeof(int);
    submit.layers = looked_up.data();
    submit.n_layers = static_cast<std::uint32_t>(looked_up.size());
    submit.whole_layers = whole.data();
    submit.n_whole_layers = static_cast<std::uint32_t>(whole.size());
    submit.n_tokens = 1;
    check(moecached_gpu_lane_submit(lane, &submit), "submit");

    for (std::uint32_t l = 0; l < layers.size(); ++l)
      compute(of_file[l], ids + l * top_k, top_k, x, inner, y + (layers.size() + l) * hidden, stream);
    std::vector<float> results(2 * layers.size() * hidden);
    std::vector<int> used(looked_up.size() * top_k);
    check(cudaMemcpyAsync(results.data(), y, results.size() * sizeof(float), cudaMemcpyDeviceToHost, stream),
          "results");
    check(cudaMemcpyAsync(used.data(), slots, used.size() * sizeof(int), cudaMemcpyDeviceToHost, stream),
          "slots");
    check(cudaStreamSynchronize(stream), "kernels");
    for (std::uint32_t l = 0; l < layers.size(); ++l) {
      n_different += memcmp(&results[l * hidden], &results[(layers.size() + l) * hidden],
                            layers[l].view.layer.down.n_rows * sizeof(float)) != 0;
    }
    n_device += whole.size() * top_k;
    for (std::size_t i = 0; i < used.size(); ++i) {
      const moecached_gpu_layer_info& info = layers[looked_up[i / top_k] & ~MOECACHED_GPU_BY_EXPERT].info;
      // The host slots of a layer, one an expert, are its last ones.
      const bool on_device =
          info.by_expert == 0 && static_cast<std::uint32_t>(used[i]) + info.n_experts < info.n_slots;
      ++(on_device ? n_device : n_host);
    }
  }
  std::printf(
      "%s: %u tokens, %zu layers, top %u; experts used in VRAM %llu, in RAM %llu; layers that differ %llu\n",
      n_different == 0 ? "equal" : "DIFFERENT", token, layers.size(), top_k,
      static_cast<unsigned long long>(n_device), static_cast<unsigned long long>(n_host),
      static_cast<unsigned long long>(n_different));
  moecached_gpu_lane_close(lane);
  moecached_gpu_model_close(model);
  moecached_session_close(session);
  return n_different == 0 ? 0 : 1;
}
