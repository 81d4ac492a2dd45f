// The real client against the real daemon for a model that spills from a GPU, over a CUDA driver made of host
// memory: leases, moves between RAM and device slots, arrays, scratch slots and streams are the real ones,
// only kernels are loops of the CPU. Threads stand for backend instances: they resolve, read every byte of
// what they were given, end.
#include <functional>
#include <numeric>

#include "tests/integration/gpu_daemon_fixture.h"
#include "tests/support/soft_cuda/library.h"

namespace moecached {
namespace {

constexpr std::uint32_t kRamSlots = 6;
constexpr std::uint32_t kDeviceSlots = 4;

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

TEST_F(SpillDaemonTest, AModelThatIsToSpillIsRefusedAsOneThatRamHolds) {
  start_spill();
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_gpu_model* covered = nullptr;
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu_at(0).uuid.data(), &covered), MOECACHED_E_SPILL);
  EXPECT_NE(std::string(moecached_last_error()).find("gpu.mode"), std::string::npos)
      << moecached_last_error();
  EXPECT_EQ(moecached_session_connected(session), 1) << "a refusal is an answer";
  moecached_model* spill = nullptr;
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK);
  moecached_model* ram = nullptr;
  EXPECT_EQ(moecached_model_open(session, &path, 1, &ram), MOECACHED_OK);
  EXPECT_EQ(daemon_->models().size(), 2u) << "one in RAM alone has slots of its own";
  moecached_spill_lane* lane = nullptr;
  EXPECT_EQ(moecached_spill_lane_open(ram, &lane), MOECACHED_E_ARGUMENT);
  moecached_model_close(ram);
  moecached_model_close(spill);
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, NoModelSpillsWhereRamIsToHoldAll) {
  start_spill(GpuMode::kCovered);
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_model* spill = nullptr;
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill),
            MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()).find("gpu.mode"), std::string::npos)
      << moecached_last_error();
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, AModelThatIsBeingOpenedMakesNoRoomForAnother) {
  max_models_ = 1;
  start_spill();
  const test::SoftCuda cuda;
  const auto open_session = [this] {
    moecached_session* session = nullptr;
    EXPECT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
    return session;
  };
  moecached_session* const first = open_session();
  moecached_session* const second = open_session();
  const char* path = model_.c_str();
  cuda.hold_next("cuMemHostRegister");  // as pinning a pool of hundreds of GB takes long
  moecached_model* spill = nullptr;
  std::thread opens([&] {
    EXPECT_EQ(moecached_spill_model_open(first, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK)
        << moecached_last_error();
  });
  EXPECT_TRUE(eventually([&] { return cuda.holds(); }));
  EXPECT_FALSE(daemon_->drop_model(report().id));
  moecached_model* ram = nullptr;
  EXPECT_EQ(moecached_model_open(second, &path, 1, &ram), MOECACHED_E_REFUSED) << "it would need its place";
  EXPECT_NE(std::string(moecached_last_error()).find("limits.models"), std::string::npos)
      << moecached_last_error();
  cuda.release();
  opens.join();
  if (spill != nullptr) moecached_model_close(spill);
  moecached_session_close(first);
  EXPECT_TRUE(eventually([&] { return moecached_model_open(second, &path, 1, &ram) == MOECACHED_OK; }))
      << "closed, it is idle";
  if (ram != nullptr) moecached_model_close(ram);
  moecached_session_close(second);
}

TEST_F(SpillDaemonTest, AModelThatCannotBePreparedGoes) {
  start_spill();
  const test::SoftCuda cuda;
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_model* spill = nullptr;
  cuda.fail_next("cuMemHostRegister", CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_NE(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK);
  EXPECT_TRUE(daemon_->models().empty());
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK)
      << moecached_last_error();
  if (spill != nullptr) moecached_model_close(spill);
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, EveryByteIsRightWhileExpertsMoveBetweenAllTiers) {
  start_spill();
  std::vector<std::thread> threads;
  std::array<SpillClient::Outcome, 3> outcomes;
  std::atomic<bool> stop{false};
  for (std::uint32_t t = 0; t < outcomes.size(); ++t) {
    threads.emplace_back([this, t, &outcomes, &stop] {
      SpillClient client(folder_, model_);
      if (t > 0) client.use_waits(kTopK);
      for (std::uint32_t round = 0; !stop.load(); ++round)
        outcomes[t] += client.tokens(t * 100 + round, 400, round);
    });
  }
  const bool enough = eventually([this] { return sum().swaps > 300 && sum().device_hits > 10'000; });
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  SpillClient::Outcome all;
  for (const auto& outcome : outcomes) all += outcome;
  const LayerReport counted = sum();
  EXPECT_TRUE(enough) << counted.swaps << " swaps, " << counted.device_hits << " device hits";
  EXPECT_EQ(all.wrong, 0u) << "of " << all.slots;
  EXPECT_GT(all.device_slots, 1000u);
  EXPECT_GT(outcomes[1].waited + outcomes[2].waited, 500u);
  EXPECT_GT(counted.misses, 0u);
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
  EXPECT_LE(counted.device_resident, kDeviceSlots * kLayers);
  std::printf(
      "%zu slots read, %zu on the device; %llu lookups: %llu device, %llu RAM, %llu disk; %llu rises, %llu "
      "swaps\n",
      all.slots, all.device_slots, static_cast<unsigned long long>(counted.lookups),
      static_cast<unsigned long long>(counted.device_hits),
      static_cast<unsigned long long>(counted.hits - counted.device_hits),
      static_cast<unsigned long long>(counted.misses), static_cast<unsigned long long>(counted.rises),
      static_cast<unsigned long long>(counted.swaps));
}

TEST_F(SpillDaemonTest, CanaryWithoutGracePeriodsBytesAreWrong) {
  const Variable no_grace("MOECACHED_TEST_NO_GRACE");
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::atomic<std::size_t> wrong{0};
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([this, t, &stop, &wrong] {
      SpillClient client(folder_, model_);
      if (t > 0) client.use_waits(kTopK);
      for (std::uint32_t round = 0; !stop.load(); ++round)
        wrong += client.tokens(t * 100 + round, 100, 5 * t + round).wrong;
    });
  }
  EXPECT_TRUE(eventually([&] { return wrong.load() > 0; }))
      << "a test that compares bytes would not see a slot that is reused";
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(SpillDaemonTest, AnExpertIsInVramOrInRamAndBothTogetherCanHoldAll) {
  start_spill(GpuMode::kSpill, kExperts - kRamSlots);
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  EXPECT_TRUE(eventually([&] {
    ++seed;
    EXPECT_EQ(client.tokens(seed, 50, seed).wrong, 0u);
    const LayerReport all = sum();
    std::uint32_t in_ram = 0;
    for (const LayerReport& layer : report().layers) in_ram += layer.resident;
    return all.device_resident + in_ram == kExperts * kLayers;
  })) << "sixteen experts in six slots of RAM and ten of the device";
  const std::uint64_t read = report().bytes_read;
  EXPECT_EQ(client.tokens(1, 400, 0).wrong, 0u);
  EXPECT_EQ(report().bytes_read, read) << "nothing is read from disk any more: what comes down is waited for";
}

TEST_F(SpillDaemonTest, ModelsThatSpillAndModelsThatDoNotShareWhatAGpuMayHold) {
  gpu_bytes_ = 40u << 20;  // enough for either
  for (const bool spill_first : {true, false}) {
    SCOPED_TRACE(spill_first);
    daemon_.reset();
    start_spill(GpuMode::kAuto);
    SpillClient spills(folder_, model_);
    GpuClient covered(folder_, model_);
    const auto bytes = [this](bool of_spill) {
      std::uint64_t sum = 0;
      for (const ModelReport& model : daemon_->models())
        sum += model.spills == of_spill ? model.device_bytes : 0;
      return sum;
    };
    const auto compute = [&](bool spill) {
      const std::size_t wrong = spill ? spills.tokens(1, 20, 0).wrong : covered.graphs(1, 20).wrong;
      EXPECT_EQ(wrong, 0u);
    };
    EXPECT_TRUE(eventually([&] {
      compute(spill_first);
      return bytes(spill_first) > 0;
    }));
    EXPECT_TRUE(eventually([&] {
      compute(!spill_first);
      return bytes(!spill_first) > 0 || std::ranges::any_of(daemon_->doctor(), [](const Finding& finding) {
               return finding.text.find("gpu.bytes") != std::string::npos;
             });
    }));
    EXPECT_LE(bytes(true) + bytes(false), gpu_bytes_);
  }
}

TEST_F(SpillDaemonTest, PartsOfAllExpertsAreLoadedFromAllTiersToWhereTheFileHasThem) {
  start_spill();
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  std::vector<std::int32_t> all, odd;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) {
    all.push_back(e);
    if (e % 2 == 1 || e > 11) odd.push_back(e);
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(client.whole(layer, all).wrong, 0u);
    EXPECT_EQ(client.whole(layer, odd).wrong, 0u);
  }
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.streamed_experts, 0u);
  EXPECT_EQ(counters.fallback_reads, 0u);
}

TEST_F(SpillDaemonTest, MoreExpertsThanSlotsAreNotWaitedFor) {
  start_spill();
  SpillClient client(folder_, model_);
  std::vector<std::int32_t> ids;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kRamSlots) + 1; ++e) ids.push_back(e);
  EXPECT_EQ(client.resolve(0, ids).too_many, 1u);
  ids.pop_back();
  EXPECT_EQ(client.resolve(0, ids).wrong, 0u);
  moecached_spill_end(client.lane());
}

TEST_F(SpillDaemonTest, TwoLanesThatNeedAllSlotsTakeTurns) {
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> wrong{0}, done{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      SpillClient client(folder_, model_);
      std::vector<std::int32_t> ids;
      for (std::int32_t e = 0; e < static_cast<std::int32_t>(kRamSlots); ++e)
        ids.push_back(t == 0 ? e : 15 - e);
      for (int i = 0; i < 300; ++i) {
        const auto outcome = client.resolve(static_cast<std::uint32_t>(i) % kLayers, ids);
        wrong += outcome.wrong;
        done += outcome.slots > 0 ? 1 : 0;
      }
      moecached_spill_end(client.lane());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(done.load(), 600u);
}

TEST_F(SpillDaemonTest, AWaitingGraphIsAnsweredWhenTheDaemonGoes) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kTopK);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  const auto outcome =
      client.waiting_graph({{{0, 1, 2, 3}, {4, 9, 14, 15}, {5, 10, 11, 13}}}, [&](std::uint32_t layer) {
        if (layer == 0) daemon_.reset();
      });
  EXPECT_EQ(outcome.wrong, 0u);
  EXPECT_EQ(outcome.waited, 1u);
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.fallback_reads, 0u) << "it had all that it needed, which shows nothing";
  const auto behind = client.tokens(1, 20, 3);
  EXPECT_EQ(behind.wrong, 0u);
  EXPECT_EQ(behind.waited, 0u) << "without a daemon graphs are cut";
}

TEST_F(SpillDaemonTest, AWaitForMoreExpertsThanCanBeLeasedReadsThemFromTheFile) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kRamSlots + 2);  // the daemon has taken slots away since the graph was begun
  const std::vector<std::int32_t> many = {0, 2, 4, 6, 8, 10, 12, 6}, few = {1, 3};
  const auto outcome = client.waiting_graph({{few, many, few}});
  EXPECT_EQ(outcome.wrong, 0u);
  EXPECT_EQ(outcome.slots, many.size() + 2 * few.size());
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_EQ(counters.fallback_reads, 7u);
}

TEST_F(SpillDaemonTest, WaitsThatNeverComeEndWithTheGraph) {
  start_spill();
  SpillClient client(folder_, model_);
  ASSERT_EQ(moecached_spill_waits_reserve(client.lane(), kTopK), MOECACHED_OK) << moecached_last_error();
  const std::uint32_t layers[] = {0, 1, 2};
  ASSERT_EQ(moecached_spill_waits_begin(client.lane(), layers, 3, kTopK, kTopK), MOECACHED_OK)
      << moecached_last_error();
  EXPECT_EQ(moecached_spill_waits_end(client.lane()), MOECACHED_E_SYSTEM) << "its launch failed";
  EXPECT_NE(std::string(moecached_last_error()).find("has not asked"), std::string::npos)
      << moecached_last_error();
  client.use_waits(kTopK);
  EXPECT_EQ(client.tokens(1, 20, 0).wrong, 0u);
}

TEST_F(SpillDaemonTest, AFailureIsToldAtTheEndOfTheGraphAndEveryLayerIsAnswered) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kTopK);
  const std::uint32_t layers[] = {0, 1};
  ASSERT_EQ(moecached_spill_waits_begin(client.lane(), layers, 2, kTopK, kTopK), MOECACHED_OK)
      << moecached_last_error();
  std::int32_t ids[] = {3, -1}, slots[] = {-1, -1};
  for (const std::uint32_t layer : layers) {
    const moecached_spill_wait wait{&ids, reinterpret_cast<std::uint64_t>(ids),
                                    reinterpret_cast<std::uint64_t>(slots), 2, layer};
    ASSERT_EQ(moecached_spill_wait_enqueue(client.lane(), &wait), MOECACHED_OK);
    EXPECT_EQ(slots[0], 0) << "the graph computes on, within memory that is there";
    ids[1] = 0;
  }
  EXPECT_EQ(moecached_spill_waits_end(client.lane()), MOECACHED_E_ARGUMENT);
  EXPECT_NE(std::string(moecached_last_error()).find("expert id"), std::string::npos)
      << moecached_last_error();
  EXPECT_EQ(client.tokens(1, 20, 0).wrong, 0u);
}

TEST_F(SpillDaemonTest, WaitsAreRefusedWhereThereIsNoRoomForThem) {
  start_spill();
  SpillClient client(folder_, model_);
  EXPECT_EQ(moecached_spill_waits_reserve(client.lane(), 65), MOECACHED_E_TOO_MANY);
  const std::uint32_t layer = kLayers;
  EXPECT_EQ(moecached_spill_waits_begin(client.lane(), &layer, 1, kTopK, kTopK), MOECACHED_E_ARGUMENT);
  const std::uint32_t layers[] = {0, 1, 2};
  ASSERT_EQ(moecached_spill_waits_reserve(client.lane(), kRamSlots + 1), MOECACHED_OK);
  EXPECT_EQ(moecached_spill_waits_begin(client.lane(), layers, 3, kRamSlots + 1, kRamSlots + 1),
            MOECACHED_E_TOO_MANY)
      << "a layer has no slots for as many";
  EXPECT_EQ(client.tokens(1, 5, 0).wrong, 0u);
  std::int32_t ids[kRamSlots + 2] = {}, slots[kRamSlots + 2] = {};
  const moecached_spill_wait wait{&ids, reinterpret_cast<std::uint64_t>(ids),
                                  reinterpret_cast<std::uint64_t>(slots), kRamSlots + 2, 0};
  EXPECT_EQ(moecached_spill_wait_enqueue(client.lane(), &wait), MOECACHED_E_ARGUMENT)
      << "more ids than were reserved";
}

TEST_F(SpillDaemonTest, LanesGoOnFromTheFileWhenTheDaemonIsGone) {
  start_spill();
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  client.use_waits(kTopK);
  EXPECT_EQ(client.tokens(6, 50, 0).waited, 50u);
  daemon_.reset();
  EXPECT_EQ(client.tokens(7, 200, 9).wrong, 0u);
  std::vector<std::int32_t> all;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) all.push_back(e);
  EXPECT_EQ(client.whole(1, all).wrong, 0u);
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.fallback_reads, 0u);
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // a reconnect is tried that often
  EXPECT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(client.tokens(8, 200, 3).wrong, 0u);
  EXPECT_GT(sum().lookups, 0u) << "the next daemon serves it";
  const auto waiting = client.tokens(9, 200, 5);
  EXPECT_EQ(waiting.wrong, 0u);
  EXPECT_EQ(waiting.waited, 200u) << "its memory can be waited for as well";
}

TEST_F(SpillDaemonTest, ALaneThatWasIdleFindsTheDaemonThatServesNow) {
  start_spill();
  SpillClient client(folder_, model_);
  moecached_spill_lane* idle = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &idle), MOECACHED_OK) << moecached_last_error();
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return client.has_device_slots();
  }));
  moecached_spill_lane* const busy = client.exchange_lane(idle);
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  const std::uint64_t generation = moecached_spill_lane_generation(idle);
  client.exchange_lane(busy);
  // Twice, so that what the second daemon gives may lie where that of the first one lay.
  for (int i = 0; i < 2; ++i) {
    daemon_.reset();
    start_spill();
    EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
        << moecached_last_error();
  }
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  client.exchange_lane(idle);
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  EXPECT_GT(moecached_spill_lane_generation(idle), generation)
      << "device slots of a daemon that is gone are looked for no more";
  client.exchange_lane(busy);
  moecached_spill_lane_close(idle);
}

TEST_F(SpillDaemonTest, NothingStaysPageLockedOfADaemonThatIsGone) {
  start_spill();
  const test::SoftCuda cuda;
  SpillClient client(folder_, model_);
  moecached_spill_lane* idle = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &idle), MOECACHED_OK) << moecached_last_error();
  daemon_.reset();
  start_spill();
  const std::string calls = cuda.calls_of([&] {
    EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
        << moecached_last_error();
  });
  std::size_t n_unlocked = 0;
  for (std::size_t at = 0; (at = calls.find("cuMemHostUnregister", at)) != std::string::npos; ++at)
    ++n_unlocked;
  EXPECT_EQ(n_unlocked, kLayers + 2) << "the windows, and the stream buffers of two lanes: what is mapped at "
                                        "their addresses next would be read as what was";
  EXPECT_EQ(client.tokens(1, 50, 0).wrong, 0u);
  moecached_spill_lane_close(idle);
}

// Waves of a few experts, of sizes and places that are multiples of nothing, read slowly.
class SpillStreamTest : public SpillDaemonTest {
 protected:
  [[nodiscard]] test::MoeSpec spec() const override {
    return {.n_layers = kLayers,
            .n_experts = kExperts,
            .n_expert_used = kTopK,
            .n_embd = 288,
            .n_ff = 96,
            .up_type = 2,    // q4_0
            .down_type = 1,  // f16
            .biases = true};
  }
  void adjust(Config& config) const override {
    config.stream_bytes = 256u << 10;
    config.ssd = ssd_;
  }
  void read_slowly() {
    ssd_.engine = SsdEngine::kPread;
    ssd_.queue_depth = 1;
    ssd_.max_read_bytes = 4096;
  }
  static std::vector<std::int32_t> all() {
    std::vector<std::int32_t> out;
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) out.push_back(e);
    return out;
  }
  static std::uint32_t parts_of(SpillClient& client, std::uint32_t layer) {
    moecached_layer_info info{};
    EXPECT_EQ(moecached_model_layer(client.model(), layer, &info), MOECACHED_OK);
    return info.n_parts;
  }
  static moecached_counters counters_of(SpillClient& client) {
    moecached_counters counters{};
    moecached_model_counters(client.model(), &counters);
    return counters;
  }
  SsdOptions ssd_;
};

TEST_F(SpillStreamTest, NeighboursAndScatteredExpertsLandWhereTheFileHasThem) {
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(1);
  std::size_t wrong = 0;
  for (std::uint32_t round = 0; round < 200; ++round) {
    std::vector<std::int32_t> experts;
    const std::uint32_t of_eight = 1 + random() % 8;
    for (const std::int32_t e : all()) {
      if (random() % 8 < of_eight) experts.push_back(e);
    }
    if (round % 3 == 0) std::ranges::shuffle(experts, random);
    if (!experts.empty())
      wrong += client.whole(static_cast<std::uint32_t>(random() % kLayers), experts).wrong;
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(counters_of(client).fallback_reads, 0u);
  EXPECT_GT(report().streamed_bytes, 0u);
}

TEST_F(SpillStreamTest, APromptReadsEachPartOnceThoughItReadsAheadOverPartsAndLayers) {
  start_spill();
  SpillClient client(folder_, model_);
  for (std::uint64_t prompt = 1; prompt <= 3; ++prompt) {
    std::uint64_t parts = 0;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(client.whole(layer, all()).wrong, 0u);
      parts += parts_of(client, layer);
    }
    const moecached_counters counters = counters_of(client);
    EXPECT_EQ(counters.streamed_experts, prompt * parts * kExperts);
    EXPECT_EQ(counters.lookups, prompt * kLayers * kExperts);
    EXPECT_EQ(counters.hits, 0u);
    EXPECT_EQ(report().streamed_parts, counters.streamed_experts);
  }
}

TEST_F(SpillStreamTest, WhatWasReadAheadForALayerThatDoesNotComeIsNotTakenForAnother) {
  read_slowly();
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(2);
  std::size_t wrong = 0, lookups = 0;
  const auto whole = [&](std::uint32_t layer, const std::vector<std::int32_t>& experts) {
    lookups += experts.size();
    wrong += client.whole(layer, experts).wrong;
  };
  for (int round = 0; round < 4; ++round) {
    whole(0, all());
    whole(2, {1, 3, 4, 9});  // layer 1 was read ahead for
    whole(1, all());
    whole(2, {0, 15});  // few of those that were read ahead
    whole(0, all());
    wrong += client.token(random, 0).wrong;  // decode takes the place of the next layer
    whole(1, all());
    whole(1, {5, 7});  // the same again
  }
  EXPECT_EQ(wrong, 0u);
  const moecached_counters counters = counters_of(client);
  EXPECT_EQ(counters.lookups, lookups + 4 * kLayers * kTopK) << "what nobody asked for is no lookup";
  EXPECT_EQ(counters.fallback_reads, 0u);
  const LayerReport counted = sum();
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
}

TEST_F(SpillStreamTest, AGuessThatWasWrongIsNotRepeated) {
  start_spill();
  SpillClient client(folder_, model_);
  std::mt19937 random(3);
  std::uint64_t read = 0;
  for (int prompt = 0; prompt < 5; ++prompt) {
    const std::uint64_t before = counters_of(client).streamed_experts;
    EXPECT_EQ(client.whole(0, all()).wrong, 0u);
    EXPECT_EQ(client.resolve(1, {0, 1, 2, 3}).wrong,
              0u);  // as the last layer of a prompt, which computes one row
    moecached_spill_end(client.lane());
    if (prompt == 2) read = counters_of(client).streamed_experts - before;
  }
  EXPECT_EQ(read, parts_of(client, 0) * kExperts);
}

TEST_F(SpillStreamTest, ALaneIsClosedWithAWaveUnderWay) {
  read_slowly();
  start_spill();
  for (int round = 0; round < 5; ++round) {
    SpillClient client(folder_, model_);
    EXPECT_EQ(client.whole(static_cast<std::uint32_t>(round) % 2, all()).wrong, 0u);
  }
  SpillClient client(folder_, model_);
  moecached_spill_lane* lane = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &lane), MOECACHED_OK);
  const std::vector<std::int32_t> experts = all();
  ASSERT_EQ(moecached_spill_begin_layer(lane, 0, experts.data(), experts.size()), MOECACHED_OK);
  moecached_spill_lane_close(lane);
  EXPECT_EQ(client.whole(1, all()).wrong, 0u);
}

TEST_F(SpillStreamTest, TheDaemonDiesWhileAWaveIsUnderWay) {
  read_slowly();
  start_spill();
  SpillClient client(folder_, model_);
  EXPECT_EQ(client.whole(0, all()).wrong, 0u);
  const auto dies = [&](std::uint32_t part) {
    if (part == 1) daemon_.reset();
  };
  EXPECT_EQ(client.whole(1, all(), dies).wrong, 0u);
  EXPECT_EQ(client.whole(2, all()).wrong, 0u);
  EXPECT_GT(counters_of(client).fallback_reads, 0u);
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // a reconnect is tried that often
  ASSERT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  const std::uint64_t fallback = counters_of(client).fallback_reads;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_EQ(client.whole(layer, all()).wrong, 0u);
  EXPECT_EQ(counters_of(client).fallback_reads, fallback) << "the next daemon serves it";
  daemon_.reset();  // with what it has read ahead
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  ASSERT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(client.whole(2, all()).wrong, 0u);
}

TEST_F(SpillStreamTest, PromptsAndDecodeOfSeveralLanesShareTheSlots) {
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> wrong{0};
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([this, t, &wrong] {
      SpillClient client(folder_, model_);
      std::mt19937 random(t);
      for (std::uint32_t round = 0; round < 40; ++round) {
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
          std::vector<std::int32_t> experts = all();
          if (round % 4 == t) std::erase_if(experts, [&](std::int32_t) { return random() % 2 == 0; });
          if (!experts.empty()) wrong += client.whole(layer, experts).wrong;
        }
        wrong += client.tokens(t * 100 + round, 20, round).wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  const LayerReport counted = sum();
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
}

}  // namespace
}  // namespace moecached
