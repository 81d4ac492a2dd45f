// A daemon whose model spills, over the CUDA driver made of host memory, and a client of it that reads every
// byte of what it is given.
#pragma once

#include <functional>
#include <numeric>

#include "tests/integration/gpu_daemon_fixture.h"

namespace moecached {

inline constexpr std::uint32_t kRamSlots = 6;
inline constexpr std::uint32_t kDeviceSlots = 4;

class SpillDaemonTest : public GpuDaemonTest {
 protected:
  void start_spill(GpuMode mode = GpuMode::kSpill, std::uint32_t device_slots = kDeviceSlots) {
    Config config;
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.pool_bytes = 64u << 20;
    config.slots = {.kind = SlotsSpec::Kind::kCount, .value = kRamSlots};
    config.gpu.mode = mode;
    config.gpu.slots = {.kind = SlotsSpec::Kind::kCount, .value = static_cast<double>(device_slots)};
    config.gpu.keep_free = 0;
    config.gpu.bytes = gpu_bytes_;
    config.max_models = max_models_;
    adjust(config);
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
  }
  virtual void adjust(Config&) const {}
  LayerReport sum() {
    LayerReport out;
    const std::vector<ModelReport> models = daemon_->models();
    if (models.empty()) return out;  // nobody has opened it yet
    for (const LayerReport& layer : models.front().layers) {
      out.lookups += layer.lookups;
      out.hits += layer.hits;
      out.misses += layer.misses;
      out.device_hits += layer.device_hits;
      out.device_resident += layer.device_resident;
      out.rises += layer.rises;
      out.swaps += layer.swaps;
    }
    return out;
  }

  std::uint64_t gpu_bytes_ = 0;
};

class SpillClient {
 public:
  explicit SpillClient(const std::filesystem::path& folder, const std::filesystem::path& model) {
    EXPECT_EQ(moecached_session_open((folder / "handle.sock").c_str(), "spill-test", &session_), MOECACHED_OK)
        << moecached_last_error();
    const char* path = model.c_str();
    const GpuId gpu = gpu_at(0);
    EXPECT_EQ(moecached_spill_model_open(session_, &path, 1, gpu.uuid.data(), &model_), MOECACHED_OK)
        << moecached_last_error();
    if (model_ == nullptr) return;
    EXPECT_EQ(moecached_spill_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
    auto driver = CudaDriver::load();
    EXPECT_TRUE(driver);
    cu_ = *driver;
    CUdevice device = 0;
    CUcontext context = nullptr;
    cu_->cuDeviceGet(&device, 0);
    cu_->cuDevicePrimaryCtxRetain(&context, device);
    cu_->cuCtxPushCurrent(context);  // as in an engine's thread; a client stays on its thread
    cu_->cuEventCreate(&ready_, CU_EVENT_DISABLE_TIMING);
  }
  ~SpillClient() {
    if (lane_ != nullptr) moecached_spill_lane_close(lane_);
    if (model_ != nullptr) moecached_model_close(model_);
    moecached_session_close(session_);
    if (cu_ == nullptr) return;
    cu_->cuEventDestroy(ready_);
    CUcontext context = nullptr;
    cu_->cuCtxPopCurrent(&context);
    cu_->cuDevicePrimaryCtxRelease(0);
  }
  SpillClient(const SpillClient&) = delete;
  SpillClient& operator=(const SpillClient&) = delete;

  struct Outcome {
    std::size_t slots = 0, device_slots = 0, wrong = 0, too_many = 0;
    std::size_t waited = 0;  // graphs that waited on the GPU
    Outcome& operator+=(const Outcome& other) {
      slots += other.slots;
      device_slots += other.device_slots;
      wrong += other.wrong;
      too_many += other.too_many;
      waited += other.waited;
      return *this;
    }
  };

  // One token: kTopK distinct experts of each layer, those near `first` most often.
  Outcome token(std::mt19937& random, std::uint32_t first, std::size_t n = kTopK) {
    std::array<std::vector<std::int32_t>, kLayers> ids;
    for (std::vector<std::int32_t>& of_layer : ids) {
      while (of_layer.size() < n) {
        const std::uint32_t far = random() % kExperts;
        const auto id =
            static_cast<std::int32_t>((first + std::min<std::uint32_t>(far, random() % kExperts)) % kExperts);
        if (std::ranges::find(of_layer, id) == of_layer.end()) of_layer.push_back(id);
      }
    }
    if (waits_) return waiting_graph(ids);
    Outcome out;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) out += resolve(layer, ids[layer]);
    moecached_spill_end(lane_);
    return out;
  }
  // Tokens wait on the GPU from now on, as long as there is a daemon.
  void use_waits(std::uint32_t n_ids) {
    ASSERT_EQ(moecached_spill_waits_reserve(lane_, n_ids), MOECACHED_OK) << moecached_last_error();
    waits_ = true;
  }
  // One graph that is launched whole. between: behind each layer.
  Outcome waiting_graph(const std::array<std::vector<std::int32_t>, kLayers>& ids,
                        const std::function<void(std::uint32_t)>& between = {}) {
    std::array<std::uint32_t, kLayers> layers{};
    std::iota(layers.begin(), layers.end(), 0u);
    Outcome out;
    const moecached_status begun =
        moecached_spill_waits_begin(lane_, layers.data(), layers.size(), kTopK, kTopK);
    if (begun == MOECACHED_E_UNAVAILABLE) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) out += resolve(layer, ids[layer]);
      moecached_spill_end(lane_);
      return out;
    }
    EXPECT_EQ(begun, MOECACHED_OK) << moecached_last_error();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<std::int32_t> slots(ids[layer].size(), -1);
      const moecached_spill_wait wait{ready_, reinterpret_cast<std::uint64_t>(ids[layer].data()),
                                      reinterpret_cast<std::uint64_t>(slots.data()),
                                      static_cast<std::uint32_t>(slots.size()), layer};
      EXPECT_EQ(moecached_spill_wait_enqueue(lane_, &wait), MOECACHED_OK) << moecached_last_error();
      out += check(layer, ids[layer], slots);
      if (between) between(layer);
    }
    ++out.waited;
    EXPECT_EQ(moecached_spill_waits_end(lane_), MOECACHED_OK) << moecached_last_error();
    return out;
  }
  Outcome tokens(std::uint32_t seed, int n, std::uint32_t first) {
    std::mt19937 random(seed);
    Outcome out;
    for (int i = 0; i < n; ++i) out += token(random, first + static_cast<std::uint32_t>(i) / 200);
    return out;
  }
  Outcome resolve(std::uint32_t layer, const std::vector<std::int32_t>& ids) {
    Outcome out;
    std::vector<std::int32_t> slots(ids.size()), on_device(ids.size(), -1);
    const moecached_spill_target target{reinterpret_cast<std::uint64_t>(on_device.data()), ready_};
    const auto status =
        moecached_spill_resolve(lane_, layer, ids.data(), 1, ids.size(), 0, slots.data(), &target);
    if (status == MOECACHED_E_TOO_MANY) {
      out.too_many = 1;
      return out;
    }
    EXPECT_EQ(status, MOECACHED_OK) << moecached_last_error();
    if (status != MOECACHED_OK) {
      out.wrong = 1;
      return out;
    }
    EXPECT_EQ(slots, on_device);
    return check(layer, ids, slots);
  }
  // Every byte of what these slots are to hold.
  Outcome check(std::uint32_t layer, const std::vector<std::int32_t>& ids,
                const std::vector<std::int32_t>& slots) {
    Outcome out;
    moecached_layer_info info{};
    EXPECT_EQ(moecached_model_layer(model_, layer, &info), MOECACHED_OK);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ++out.slots;
      out.device_slots +=
          slots[i] < static_cast<std::int32_t>(kDeviceSlots) && info.n_parts > 0 && has_device_slots() ? 1
                                                                                                       : 0;
      for (std::uint32_t p = 0; p < info.n_parts; ++p) {
        std::uint64_t window = 0;
        std::uint32_t n_slots = 0;
        EXPECT_EQ(moecached_spill_lane_window(lane_, layer, p, &window, &n_slots), MOECACHED_OK);
        EXPECT_LT(slots[i], static_cast<std::int32_t>(n_slots));
        const std::vector<std::byte>& expected = expert(layer, p, ids[i]);
        const auto* at = reinterpret_cast<const std::byte*>(window) +
                         static_cast<std::uint64_t>(slots[i]) * expected.size();
        out.wrong += std::memcmp(at, expected.data(), expected.size()) != 0 ? 1 : 0;
      }
    }
    return out;
  }
  // All parts of these experts, as a prompt uses them. behind_part: is told of each part that was loaded.
  Outcome whole(std::uint32_t layer, const std::vector<std::int32_t>& experts,
                const std::function<void(std::uint32_t)>& behind_part = {}) {
    Outcome out;
    EXPECT_EQ(moecached_spill_begin_layer(lane_, layer, experts.data(), experts.size()), MOECACHED_OK)
        << moecached_last_error();
    moecached_layer_info info{};
    EXPECT_EQ(moecached_model_layer(model_, layer, &info), MOECACHED_OK);
    for (std::uint32_t p = 0; p < info.n_parts; ++p) {
      const std::size_t bytes = expert(layer, p, 0).size();
      std::vector<std::byte> memory(bytes * kExperts, std::byte{0xee});
      EXPECT_EQ(moecached_spill_load_part(lane_, p, reinterpret_cast<std::uint64_t>(memory.data()), ready_),
                MOECACHED_OK)
          << moecached_last_error();
      for (const std::int32_t e : experts) {
        ++out.slots;
        const std::vector<std::byte>& expected = expert(layer, p, e);
        out.wrong +=
            std::memcmp(memory.data() + static_cast<std::size_t>(e) * bytes, expected.data(), bytes) != 0;
      }
      if (behind_part) behind_part(p);
    }
    moecached_spill_end(lane_);
    return out;
  }
  [[nodiscard]] bool has_device_slots() const {
    return moecached_spill_lane_generation(lane_) > first_generation_;
  }
  moecached_model* model() { return model_; }
  moecached_session* session() { return session_; }
  moecached_spill_lane* lane() { return lane_; }
  // Computes on another lane of the model from now on; returns the one so far.
  moecached_spill_lane* exchange_lane(moecached_spill_lane* lane) { return std::exchange(lane_, lane); }

 private:
  const std::vector<std::byte>& expert(std::uint32_t layer, std::uint32_t p, std::int32_t id) {
    std::vector<std::byte>& expected = expected_[{layer, p, static_cast<std::uint32_t>(id)}];
    if (expected.empty()) {
      moecached_part_info part{};
      EXPECT_EQ(moecached_model_part(model_, layer, p, &part), MOECACHED_OK);
      expected.resize(part.expert_bytes);
      test::fill_expert(part, static_cast<std::uint32_t>(id), expected);
    }
    return expected;
  }

  moecached_session* session_ = nullptr;
  moecached_model* model_ = nullptr;
  moecached_spill_lane* lane_ = nullptr;
  const CudaDriver* cu_ = nullptr;
  CUevent ready_ = nullptr;
  bool waits_ = false;
  static constexpr std::uint64_t first_generation_ = 2;                      // scratch slots alone
  std::map<std::array<std::uint32_t, 3>, std::vector<std::byte>> expected_;  // by layer, part, expert
};

}  // namespace moecached
