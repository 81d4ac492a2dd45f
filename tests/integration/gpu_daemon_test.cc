// The real client against the real daemon for a model on a GPU, over a CUDA driver made of host memory:
// windows, chunks, tables, epochs and logs are the real ones, only kernels are loops of the CPU. Threads
// stand for backend instances: they look entries up, read the slots, report them, while the daemon swaps as
// fast as it can.
#include <gtest/gtest.h>
#include <moecached/moecached.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/ipc/daemon.h"
#include "daemon/platform/cuda_driver.h"
#include "daemon/platform/gpu.h"
#include "tests/support/gguf_builder.h"

namespace moecached {
namespace {

constexpr std::uint32_t kExperts = 16;
constexpr std::uint32_t kTopK = 4;
constexpr std::uint32_t kLayers = 3;

// Environment that the daemon reads when it starts.
class Variable {
 public:
  explicit Variable(const char* name) : name_(name) { ::setenv(name, "1", 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

GpuId first_gpu() {
  std::string reason;
  const auto gpus = list_gpus(&reason);
  EXPECT_FALSE(gpus.empty()) << reason;
  return gpus.empty() ? GpuId{} : gpus.front()->id();
}

class GpuDaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/moecached-gpu-daemon-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_ = folder_ / "model.gguf";
    test::write_file(
        model_,
        test::make_moe({.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK, .biases = true})
            .build()
            .bytes);
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(SlotsSpec slots, std::uint32_t max_slowdown_percent = 100, const char* policy = "ewma",
             bool slow_disk = false) {
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
    config.gpu.policy = policy;
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
  std::unique_ptr<Daemon> daemon_;
};

class GpuClient {
 public:
  GpuClient(const std::filesystem::path& folder, const std::filesystem::path& model) {
    EXPECT_EQ(moecached_session_open((folder / "handle.sock").c_str(), "gpu-test", &session_), MOECACHED_OK)
        << moecached_last_error();
    const char* path = model.c_str();
    const GpuId gpu = first_gpu();
    EXPECT_EQ(moecached_gpu_model_open(session_, &path, 1, gpu.uuid.data(), &model_), MOECACHED_OK)
        << moecached_last_error();
    if (model_ == nullptr) return;
    EXPECT_EQ(moecached_gpu_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
    auto driver = CudaDriver::load();
    EXPECT_TRUE(driver);
    cu_ = *driver;
    CUdevice device = 0;
    CUcontext context = nullptr;
    cu_->cuDeviceGet(&device, 0);
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
    cu_->cuDevicePrimaryCtxRelease(0);
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
      moecached_gpu_layer_info info{};
      EXPECT_EQ(moecached_gpu_model_layer(model_, layer, &info), MOECACHED_OK);
      const std::size_t row = layers.size();
      const bool whole = info.all_resident != 0;
      (whole ? whole_layers : layers)
          .push_back(static_cast<std::uint16_t>(layer | (info.by_expert != 0 ? MOECACHED_GPU_BY_EXPERT : 0)));
      const auto* table = reinterpret_cast<const std::int32_t*>(info.table);
      const std::uint32_t start = static_cast<std::uint32_t>(random());
      const auto expert_at = [&](std::uint32_t k) { return first + (start + k) % span; };
      for (std::uint32_t k = 0; k < kTopK; ++k) {
        const std::uint32_t expert = expert_at(k);
        const std::int32_t slot =
            whole ? static_cast<std::int32_t>(expert) : __atomic_load_n(table + expert, __ATOMIC_ACQUIRE);
        if (!whole) slots_[row * kTopK + k] = slot;
        ++out.slots;
        if (info.by_expert == 0 && slot < static_cast<std::int32_t>(kExperts)) ++out.device_slots;
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
  moecached_gpu_model* model() { return model_; }
  moecached_gpu_lane* lane() { return lane_; }
  moecached_session* session() { return session_; }

 private:
  bool holds(std::uint32_t layer, std::uint32_t n_parts, std::uint32_t expert, std::int32_t slot) {
    for (std::uint32_t p = 0; p < n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      EXPECT_EQ(moecached_gpu_model_part(model_, layer, p, &part, &window), MOECACHED_OK);
      expected_.resize(part.expert_bytes);
      test::fill_tensor_bytes(part.name, expert * part.expert_bytes, expected_);
      const auto* at =
          reinterpret_cast<const std::byte*>(window) + static_cast<std::uint64_t>(slot) * part.expert_bytes;
      if (std::memcmp(at, expected_.data(), expected_.size()) != 0) return false;
    }
    return true;
  }

  moecached_session* session_ = nullptr;
  moecached_gpu_model* model_ = nullptr;
  moecached_gpu_lane* lane_ = nullptr;
  const CudaDriver* cu_ = nullptr;
  CUevent done_ = nullptr, logged_ = nullptr;
  bool fetches_ = false;
  std::vector<std::int32_t> slots_;
  std::vector<std::byte> expected_;
};

constexpr SlotsSpec kSix{.kind = SlotsSpec::Kind::kCount, .value = 6};
constexpr SlotsSpec kAll{.kind = SlotsSpec::Kind::kPercent, .value = 100};

template <typename Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(GpuDaemonTest, DeviceSlotsAreAddedBehindTheFirstGraphAndFilled) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(report().device_bytes, 0u);
  const auto first = client.graphs(1, 1);
  EXPECT_EQ(first.wrong, 0u);
  EXPECT_EQ(first.device_slots, 0u);
  GpuClient::Outcome later;
  EXPECT_TRUE(eventually([&] {
    later += client.graphs(2, 5);
    return resident() == kLayers * 6;
  }));
  later += client.graphs(3, 50);
  EXPECT_EQ(later.wrong, 0u);
  EXPECT_GT(later.device_slots, 0u);
  EXPECT_GT(report().device_bytes, 0u);
}

TEST_F(GpuDaemonTest, EverySlotHoldsItsExpertWhileTheyAreSwappedUnderFourLanes) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient first(folder_, model_);
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(first.graphs(9, 5).wrong, 0u);
    return resident() > 0;
  })) << "a loaded machine may take a second for the device slots";
  std::atomic<std::size_t> wrong = 0, slots = 0, device = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      GpuClient client(folder_, model_);
      const auto out = client.graphs(seed, 1500);
      wrong += out.wrong;
      slots += out.slots;
      device += out.device_slots;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(slots, 4u * 1500 * kLayers * kTopK);
  EXPECT_GT(device, 0u);
  std::uint64_t evictions = 0;
  for (const LayerReport& layer : report().layers) evictions += layer.evictions;
  EXPECT_GT(evictions, 100u);
}

TEST_F(GpuDaemonTest, WhatIsFetchedIsRightWhileSlotsAreSwapped) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 3).wrong, 0u);
  client.fetch_from_now_on();
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(2, 50);
    return out.device_slots > 1000 && out.fetched > 1000;
  }));
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuDaemonTest, WithoutGracePeriodsTheSameReadersFindWrongBytes) {
  const Variable churn("MOECACHED_TEST_CHURN"), no_grace("MOECACHED_TEST_NO_GRACE");
  start(kSix);
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      GpuClient client(folder_, model_);
      for (std::uint32_t i = 0; i < 200 && wrong == 0; ++i) wrong += client.graphs(seed + 7 * i, 100).wrong;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(wrong, 0u);
}

TEST_F(GpuDaemonTest, WhollyResidentLayersGetStocksShape) {
  start(kAll);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 3).wrong, 0u);
  const std::uint64_t generation = moecached_gpu_model_generation(client.model());
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(5, 2);
    moecached_gpu_layer_info info{};
    return moecached_gpu_model_layer(client.model(), kLayers - 1, &info) == MOECACHED_OK &&
           info.all_resident == 1 && info.n_slots == kExperts;
  }));
  EXPECT_NE(moecached_gpu_model_generation(client.model()), generation);
  const auto before = report().layers.front();
  const auto all = client.graphs(6, 50);
  EXPECT_EQ(out.wrong + all.wrong, 0u);
  EXPECT_EQ(all.device_slots, all.slots);
  EXPECT_TRUE(eventually([&] { return report().layers.front().hits > before.hits; }))
      << "counted without a row";
  EXPECT_EQ(daemon_->sessions().front().records_refused, 0u);
}

TEST_F(GpuDaemonTest, NothingIsPromotedBeforeItIsLoaded) {
  start(kAll, 100, "ewma", true);
  GpuClient client(folder_, model_);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(1, 1);
    return resident() == kLayers * kExperts;
  }));
  out += client.graphs(2, 50);
  EXPECT_EQ(out.wrong, 0u);
  EXPECT_GT(out.device_slots, 0u);
}

TEST_F(GpuDaemonTest, ExpertsInUseEndUpInDeviceSlotsAndAreCounted) {
  start(kSix);
  GpuClient client(folder_, model_);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    const auto now = client.graphs(9, 10, 8, 6);  // six experts in use, six slots
    out += now;
    return now.device_slots == now.slots;
  }));
  EXPECT_EQ(out.wrong, 0u);
  client.graphs(10, 5, 8, 6);
  // Every graph is counted once its log is read: nothing was dropped at this pace.
  EXPECT_TRUE(eventually([&] { return report().epochs > 0 && daemon_->sessions().front().records > 0; }));
  const ModelReport model = report();
  std::uint64_t lookups = 0, hits = 0;
  for (const LayerReport& layer : model.layers) {
    lookups += layer.lookups;
    hits += layer.hits;
  }
  EXPECT_GT(hits, 0u);
  EXPECT_LE(hits, lookups);
  EXPECT_EQ(daemon_->sessions().front().records_refused, 0u);
}

TEST_F(GpuDaemonTest, ARecordingSaysWhatGraphsUsedWhileSlotsAreSwapped) {
  constexpr int kGraphs = 300;
  start(kSix);
  GpuClient client(folder_, model_);
  auto recording = daemon_->open_recording(0);
  ASSERT_TRUE(recording) << recording.error().text;
  EXPECT_EQ(client.graphs(8, kGraphs).wrong, 0u);
  const auto lookups = [this] {
    std::uint64_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.lookups;
    return n;
  };
  std::uint64_t seen = 0;
  ASSERT_TRUE(eventually([&] { return std::exchange(seen, lookups()) == seen && seen > 0; }));
  std::map<std::uint64_t, std::vector<std::vector<std::uint32_t>>> recorded;  // by graph
  RoutingEvent event;
  std::vector<std::uint32_t> experts;
  std::uint64_t n_experts = 0;
  while (recording->tap->take(&event, &experts)) {
    auto& layers = recorded[event.graph];
    ASSERT_EQ(event.layer.value, layers.size());
    ASSERT_EQ(event.n_tokens, 1u);
    layers.push_back(experts);
    n_experts += experts.size();
  }
  EXPECT_EQ(recording->tap->dropped(), 0u);
  EXPECT_EQ(n_experts, lookups());
  // The client's choices again. A graph whose log entry was not free is not in the recording; the others are,
  // in order.
  std::mt19937 random(8);
  auto next = recorded.begin();
  for (int i = 0; i < kGraphs && next != recorded.end(); ++i) {
    std::vector<std::vector<std::uint32_t>> layers(kLayers);
    for (auto& wanted : layers) {
      const auto first = static_cast<std::uint32_t>(random());
      for (std::uint32_t k = 0; k < kTopK; ++k) wanted.push_back((first + k) % kExperts);
    }
    if (next->second == layers) ++next;
  }
  EXPECT_EQ(next, recorded.end());
  EXPECT_GT(recorded.size(), 20u);
  daemon_->close_recording(recording->tap);
}

TEST_F(GpuDaemonTest, PoliciesAreSwappedWhileLanesCompute) {
  start(kSix, 100, "lru");
  std::atomic<bool> done = false;
  std::atomic<std::size_t> wrong = 0;
  std::thread computer([&] {
    GpuClient client(folder_, model_);
    wrong += client.graphs(4, 3000).wrong;
    done = true;
  });
  while (!done && daemon_->models().empty()) std::this_thread::yield();
  int swaps = 0;
  while (!done) {
    ASSERT_TRUE(daemon_->set_policy(report().id, swaps % 2 == 0 ? "ewma:decay=900" : "slru"));
    ++swaps;
  }
  computer.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(swaps, 1);
}

TEST_F(GpuDaemonTest, PromptsFillFreeSlotsAndEvictNothing) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_TRUE(eventually([&] {
    client.graphs(1, 5, 0, kExperts, true);
    return resident() == kLayers * 6;
  })) << "prompts alone fill what is free";
  const auto evictions = [&] {
    std::uint64_t n = 0;
    for (const LayerReport& layer : report().layers) n += layer.evictions;
    return n;
  };
  EXPECT_EQ(evictions(), 0u);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    const auto now = client.graphs(2, 10, 8, 6);  // decode takes all six slots
    out += now;
    return now.device_slots == now.slots;
  }));
  const std::uint64_t before = evictions();
  EXPECT_GT(before, 0u) << "the six of decode were not those of the prompts";
  for (std::uint32_t i = 0; i < 30; ++i) {
    const std::uint64_t epochs = report().epochs;
    out += client.graphs(3 + i, 10, 0, kExperts, true);  // as many as the log has room for
    EXPECT_TRUE(eventually([&] { return report().epochs >= epochs + 10; }));
  }
  EXPECT_EQ(evictions(), before);
  const auto again = client.graphs(4, 10, 8, 6);
  EXPECT_EQ(again.device_slots, again.slots);
  EXPECT_EQ(out.wrong + again.wrong, 0u);
}

TEST_F(GpuDaemonTest, SecondProcessFindsEverythingLoaded) {
  start(kSix);
  GpuClient first(folder_, model_);
  EXPECT_TRUE(eventually([&] {
    first.graphs(1, 5);
    return resident() == kLayers * 6;
  }));
  const std::uint64_t bytes = report().bytes_read, device = report().device_bytes;
  GpuClient second(folder_, model_);
  const auto out = second.graphs(2, 20);
  EXPECT_EQ(out.wrong, 0u);
  EXPECT_GT(out.device_slots, 0u) << "it maps the device slots that are there";
  EXPECT_EQ(report().bytes_read, bytes);
  EXPECT_EQ(report().device_bytes, device);
  EXPECT_EQ(daemon_->models().size(), 1u);
}

TEST_F(GpuDaemonTest, DaemonDiesAndARestartedOneTakesOver) {
  start(kSix);
  GpuClient client(folder_, model_);
  EXPECT_EQ(client.graphs(1, 100).wrong, 0u);
  daemon_.reset();
  EXPECT_EQ(client.graphs(2, 100).wrong, 0u);
  start(kSix);
  const std::uint64_t generation = moecached_gpu_model_generation(client.model());
  EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
      << moecached_last_error();
  EXPECT_NE(moecached_gpu_model_generation(client.model()), generation);
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(3, 10);
    return resident() == kLayers * 6;
  }));
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuDaemonTest, LaneThatStopsInItsEpochKeepsItsSlots) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient stopped(folder_, model_), other(folder_, model_);
  EXPECT_EQ(other.graphs(1, 200).wrong, 0u);
  ASSERT_EQ(moecached_gpu_lane_begin(stopped.lane()), MOECACHED_OK);
  EXPECT_TRUE(eventually([&] { return daemon_->sessions().front().stalled; }));
  EXPECT_EQ(other.graphs(2, 200).wrong, 0u);
}

TEST_F(GpuDaemonTest, UnknownGpuAndBrokenModelAreRefusedAndTheSessionGoesOn) {
  start(kSix);
  const auto bad = folder_ / "bad.gguf";
  std::ofstream(bad) << "this is not a model, but it is longer than a header";
  GpuClient good(folder_, model_);
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "bad", &session), MOECACHED_OK);
  const char* path = bad.c_str();
  moecached_gpu_model* model = nullptr;
  const GpuId gpu = first_gpu();
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu.uuid.data(), &model), MOECACHED_E_REFUSED);
  path = model_.c_str();
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu.uuid.data(), &model), MOECACHED_OK)
      << moecached_last_error();
  moecached_gpu_model_close(model);
  moecached_session_close(session);
  EXPECT_EQ(good.graphs(1, 50).wrong, 0u);
}

TEST_F(GpuDaemonTest, ModelOnAGpuIsDroppedWhenUnused) {
  start(kSix);
  {
    GpuClient client(folder_, model_);
    client.graphs(1, 50);
    EXPECT_FALSE(daemon_->drop_model(report().id));
  }
  EXPECT_TRUE(eventually([&] { return report().sessions == 0; }));
  EXPECT_TRUE(
      eventually([&] { return daemon_->models().empty() || bool(daemon_->drop_model(report().id)); }));
  EXPECT_TRUE(daemon_->models().empty());
}

}  // namespace
}  // namespace moecached
