// The real client against the real daemon for a model on a GPU, over a CUDA driver made of host memory:
// windows, chunks, tables, epochs and logs are the real ones, only kernels are loops of the CPU. Threads
// stand for backend instances: they look entries up, read the slots, report them.
#pragma once

#include <gtest/gtest.h>
#include <moecached/moecached.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/ipc/daemon.h"
#include "daemon/platform/cuda_driver.h"
#include "daemon/platform/gpu.h"
#include "tests/integration/slot_bytes.h"
#include "tests/support/gguf_builder.h"

namespace moecached {

inline constexpr std::uint32_t kExperts = 16;
inline constexpr std::uint32_t kTopK = 4;
inline constexpr std::uint32_t kLayers = 3;

// Environment that the daemon reads when it starts.
class Variable {
 public:
  explicit Variable(const char* name, const char* value = "1") : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

inline GpuId gpu_at(std::size_t ordinal) {
  std::string reason;
  const auto gpus = list_gpus(&reason);
  EXPECT_LT(ordinal, gpus.size()) << reason;
  return ordinal < gpus.size() ? gpus[ordinal]->id() : GpuId{};
}

class GpuDaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/moecached-gpu-daemon-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_ = folder_ / "model.gguf";
    test::write_file(model_, test::make_moe(spec()).build().bytes);
  }
  [[nodiscard]] virtual test::MoeSpec spec() const {
    return {.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK, .biases = true};
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(SlotsSpec slots, std::uint32_t max_slowdown_percent = 100, const char* policy = "ewma",
             bool slow_disk = false, SlotScope scope = SlotScope::kLayer) {
    Config config;
    if (slow_disk) {
      config.ssd.engine = SsdEngine::kPread;
      config.ssd.queue_depth = 1;
      config.ssd.max_read_bytes = 4096;
    }
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.pool_bytes = 64u << 20;
    config.gpu.slots = slots;
    config.gpu.keep_free = 0;
    config.max_models = max_models_;
    config.max_user_bytes = max_user_bytes_;
    config.gpu.policy = policy;
    config.gpu.scope = scope;
    config.gpu.peers = peers_;
    config.gpu.max_slowdown_percent = max_slowdown_percent;
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
  }
  ModelReport report() { return daemon_->models().front(); }
  std::uint32_t resident() {
    std::uint32_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.resident;
    return n;
  }

  std::filesystem::path folder_, model_;
  std::uint32_t max_models_ = 16;
  std::uint64_t max_user_bytes_ = 0;
  bool peers_ = true;
  std::unique_ptr<Daemon> daemon_;
};

class GpuClient {
 public:
  GpuClient(const std::filesystem::path& folder, const std::filesystem::path& model, int ordinal = 0)
      : GpuClient(folder, std::vector<std::filesystem::path>{model}, ordinal) {}
  GpuClient(const std::filesystem::path& folder, const std::vector<std::filesystem::path>& files,
            int ordinal = 0)
      : ordinal_(ordinal) {
    EXPECT_EQ(moecached_session_open((folder / "handle.sock").c_str(), "gpu-test", &session_), MOECACHED_OK)
        << moecached_last_error();
    std::vector<const char*> paths;
    for (const auto& file : files) paths.push_back(file.c_str());
    const GpuId gpu = gpu_at(static_cast<std::size_t>(ordinal));
    EXPECT_EQ(moecached_gpu_model_open(session_, paths.data(), paths.size(), gpu.uuid.data(), &model_),
              MOECACHED_OK)
        << moecached_last_error();
    if (model_ == nullptr) return;
    EXPECT_EQ(moecached_gpu_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
    auto driver = CudaDriver::load();
    EXPECT_TRUE(driver);
    cu_ = *driver;
    CUdevice device = 0;
    CUcontext context = nullptr;
    cu_->cuDeviceGet(&device, ordinal);
    cu_->cuDevicePrimaryCtxRetain(&context, device);
    cu_->cuCtxPushCurrent(context);  // as in an engine's thread; a client stays on its thread
    cu_->cuEventCreate(&done_, CU_EVENT_DISABLE_TIMING);
    cu_->cuEventCreate(&logged_, CU_EVENT_DISABLE_TIMING);
    slots_.resize(kLayers * kTopK);
  }
  ~GpuClient() {
    if (lane_ != nullptr) moecached_gpu_lane_close(lane_);
    if (model_ != nullptr) moecached_gpu_model_close(model_);
    moecached_session_close(session_);
    if (cu_ == nullptr) return;
    cu_->cuEventDestroy(done_);
    cu_->cuEventDestroy(logged_);
    CUcontext context = nullptr;
    cu_->cuCtxPopCurrent(&context);
    cu_->cuDevicePrimaryCtxRelease(ordinal_);
  }
  GpuClient(const GpuClient&) = delete;
  GpuClient& operator=(const GpuClient&) = delete;

  struct Outcome {
    std::size_t slots = 0, device_slots = 0, fetched = 0, wrong = 0;
    Outcome& operator+=(const Outcome& other) {
      slots += other.slots;
      device_slots += other.device_slots;
      fetched += other.fetched;
      wrong += other.wrong;
      return *this;
    }
  };

  // One graph: every layer, kTopK distinct experts of [first, first + span).
  Outcome graph(std::mt19937& random, std::uint32_t first = 0, std::uint32_t span = kExperts,
                bool is_prefill = false) {
    Outcome out;
    if (moecached_gpu_lane_begin(lane_) != MOECACHED_OK) {
      ADD_FAILURE() << moecached_last_error();
      out.wrong = 1;
      return out;
    }
    std::vector<std::uint16_t> layers, whole_layers;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      if (spans_[layer] == 0) continue;
      moecached_gpu_layer_info info{};
      EXPECT_EQ(moecached_gpu_model_layer(model_, layer, &info), MOECACHED_OK);
      const std::size_t row = layers.size();
      const bool whole = info.all_resident != 0;
      (whole ? whole_layers : layers)
          .push_back(static_cast<std::uint16_t>(layer | (info.by_expert != 0 ? MOECACHED_GPU_BY_EXPERT : 0)));
      const auto* table = reinterpret_cast<const std::int32_t*>(info.table);
      const std::uint32_t start = static_cast<std::uint32_t>(random());
      const auto expert_at = [&](std::uint32_t k) {
        return first + (start + k) % std::min(span, spans_[layer]);
      };
      for (std::uint32_t k = 0; k < kTopK; ++k) {
        const std::uint32_t expert = expert_at(k);
        const std::int32_t slot =
            whole ? static_cast<std::int32_t>(expert) : __atomic_load_n(table + expert, __ATOMIC_ACQUIRE);
        if (!whole) slots_[row * kTopK + k] = slot;
        ++out.slots;
        // Of this GPU or another; behind them there is one slot in RAM for each expert.
        if (whole || (info.by_expert == 0 && slot < static_cast<std::int32_t>(info.n_slots - kExperts)))
          ++out.device_slots;
        if (slot < 0 || slot >= static_cast<std::int32_t>(info.n_slots) ||
            !holds(layer, info.n_parts, expert, slot))
          ++out.wrong;
      }
      if (!fetches_ || whole) continue;
      std::int32_t fetched[kTopK];
      const moecached_gpu_fetch fetch{
          .stream = nullptr,
          .slots = reinterpret_cast<std::uint64_t>(slots_.data() + row * kTopK),
          .fetched = reinterpret_cast<std::uint64_t>(fetched),
          .n_ids = kTopK,
          .layer = layer | (info.by_expert != 0 ? std::uint32_t{MOECACHED_GPU_BY_EXPERT} : 0u)};
      EXPECT_EQ(moecached_gpu_lane_fetch(lane_, &fetch), MOECACHED_OK) << moecached_last_error();
      for (std::uint32_t k = 0; k < kTopK; ++k) {
        if (fetched[k] != slots_[row * kTopK + k]) ++out.fetched;
        if (fetched[k] < 0 || fetched[k] >= static_cast<std::int32_t>(info.n_slots_fetched) ||
            !holds(layer, info.n_parts, expert_at(k), fetched[k]))
          ++out.wrong;
      }
    }
    cu_->cuEventRecord(done_, nullptr);
    const moecached_gpu_submit submit{.done_event = done_,
                                      .logged_event = logged_,
                                      .slots = reinterpret_cast<std::uint64_t>(slots_.data()),
                                      .layer_pitch_bytes = kTopK * sizeof(std::int32_t),
                                      .layers = layers.data(),
                                      .n_layers = static_cast<std::uint32_t>(layers.size()),
                                      .whole_layers = whole_layers.data(),
                                      .n_whole_layers = static_cast<std::uint32_t>(whole_layers.size()),
                                      .n_tokens = 1,
                                      .is_prefill = is_prefill ? 1u : 0u};
    EXPECT_EQ(moecached_gpu_lane_submit(lane_, &submit), MOECACHED_OK) << moecached_last_error();
    return out;
  }
  Outcome graphs(std::uint32_t seed, int n, std::uint32_t first = 0, std::uint32_t span = kExperts,
                 bool is_prefill = false) {
    std::mt19937 random(seed);
    Outcome out;
    for (int i = 0; i < n; ++i) out += graph(random, first, span, is_prefill);
    return out;
  }
  void fetch_from_now_on() {
    std::uint32_t n_slots = 0;
    EXPECT_EQ(moecached_gpu_lane_scratch(lane_, &n_slots), MOECACHED_OK) << moecached_last_error();
    EXPECT_GE(n_slots, kTopK);
    fetches_ = n_slots >= kTopK;
  }
  // Of each layer: so many of its experts are used, kTopK at least; 0: the layer is not computed.
  void use_of_layers(const std::array<std::uint32_t, kLayers>& spans) { spans_ = spans; }
  moecached_gpu_model* model() { return model_; }
  moecached_gpu_lane* lane() { return lane_; }
  moecached_session* session() { return session_; }

 private:
  bool holds(std::uint32_t layer, std::uint32_t n_parts, std::uint32_t expert, std::int32_t slot) {
    for (std::uint32_t p = 0; p < n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      EXPECT_EQ(moecached_gpu_model_part(model_, layer, p, &part, &window), MOECACHED_OK);
      std::vector<std::byte>& expected = expected_[{layer, p, expert}];
      if (expected.empty()) {
        expected.resize(part.expert_bytes);
        test::fill_expert(part, expert, expected);
      }
      const auto* at =
          reinterpret_cast<const std::byte*>(window) + static_cast<std::uint64_t>(slot) * part.expert_bytes;
      if (std::memcmp(at, expected.data(), expected.size()) != 0) return false;
    }
    return true;
  }

  moecached_session* session_ = nullptr;
  moecached_gpu_model* model_ = nullptr;
  moecached_gpu_lane* lane_ = nullptr;
  const int ordinal_;
  const CudaDriver* cu_ = nullptr;
  CUevent done_ = nullptr, logged_ = nullptr;
  bool fetches_ = false;
  std::array<std::uint32_t, kLayers> spans_{kExperts, kExperts, kExperts};
  std::vector<std::int32_t> slots_;
  std::map<std::array<std::uint32_t, 3>, std::vector<std::byte>> expected_;  // by layer, part, expert
};

inline constexpr SlotsSpec kSix{.kind = SlotsSpec::Kind::kCount, .value = 6};
inline constexpr SlotsSpec kAll{.kind = SlotsSpec::Kind::kPercent, .value = 100};

template <typename Condition>
bool eventually(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace moecached
