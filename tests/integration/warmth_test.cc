// What the daemon knows of a model outlives it: the real client at a daemon that is stopped and started
// again. Everything is counted, nothing timed; every byte of every slot is compared with the file.
#include <gtest/gtest.h>
#include <moecached/moecached.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/ipc/daemon.h"
#include "tests/integration/slot_bytes.h"
#include "tests/support/gguf_builder.h"

namespace moecached {
namespace {

constexpr std::uint32_t kExperts = 32, kTopK = 4, kLayers = 3, kSlots = 8;

class WarmthTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/moecached-warmth-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_ = folder_ / "model.gguf";
    test::write_file(
        model_,
        test::make_moe({.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK}).build().bytes);
    start();
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start() {
    Config config;
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.state_directory = folder_ / "state";
    config.pool_bytes = 64u << 20;
    config.slots = {.kind = SlotsSpec::Kind::kCount, .value = kSlots};
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
  }
  void restart() {
    daemon_.reset();
    start();
  }
  // Of all layers together.
  [[nodiscard]] LayerReport counted() {
    LayerReport sum;
    for (const ModelReport& model : daemon_->models()) {
      for (const LayerReport& layer : model.layers) {
        sum.resident += layer.resident;
        sum.lookups += layer.lookups;
        sum.hits += layer.hits;
      }
    }
    return sum;
  }
  void wait_until_full() {
    while (counted().resident < kLayers * kSlots) std::this_thread::yield();
  }
  [[nodiscard]] std::filesystem::path state_file() {
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "state")) return entry.path();
    return {};
  }

  // `n` tokens of a session with this label, each of four neighbours that begin at `first` or later, seldom
  // far from it. Returns how many lookups hit, as the daemon counted.
  std::uint64_t decode(const char* label, std::uint32_t first, int n) {
    const LayerReport before = counted();
    moecached_session* session = nullptr;
    moecached_model* model = nullptr;
    moecached_lane* lane = nullptr;
    EXPECT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), label, &session), MOECACHED_OK);
    const char* path = model_.c_str();
    EXPECT_EQ(moecached_model_open(session, &path, 1, &model), MOECACHED_OK) << moecached_last_error();
    EXPECT_EQ(moecached_lane_open(model, &lane), MOECACHED_OK) << moecached_last_error();
    if (before_decoding_) before_decoding_();
    for (int token = 0; token < n; ++token) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        std::int32_t ids[kTopK], slots[kTopK];
        for (std::uint32_t k = 0; k < kTopK; ++k)
          ids[k] = static_cast<std::int32_t>((first + 2 * layer + k + (token % 3 == 2 ? 4 : 0)) % kExperts);
        EXPECT_EQ(moecached_lane_resolve(lane, layer, ids, 1, kTopK, 0, slots), MOECACHED_OK)
            << moecached_last_error();
        for (std::uint32_t k = 0; k < kTopK; ++k)
          EXPECT_EQ(test::wrong_bytes_in_slot(model, layer, ids[k], slots[k]), 0u);
      }
      moecached_lane_end(lane);
    }
    // A lane that closes sooner than the daemon looks takes its last records with it.
    const std::uint64_t expected = before.lookups + std::uint64_t{kLayers} * kTopK * static_cast<unsigned>(n);
    while (counted().lookups < expected) std::this_thread::yield();
    moecached_lane_close(lane);
    moecached_model_close(model);
    moecached_session_close(session);
    while (!daemon_->sessions().empty()) std::this_thread::yield();
    return counted().hits - before.hits;
  }

  std::filesystem::path folder_, model_;
  std::unique_ptr<Daemon> daemon_;
  std::function<void()> before_decoding_;
};

TEST_F(WarmthTest, ARestartedDaemonHitsFromTheFirstTokenOn) {
  const std::uint64_t cold = decode("a", 5, 3);
  decode("a", 5, 60);
  restart();
  ASSERT_TRUE(daemon_->register_model({model_}));
  wait_until_full();  // before any client is there
  const std::uint64_t warm = decode("a", 5, 3);
  EXPECT_EQ(warm, 3u * kLayers * kTopK);
  EXPECT_LT(cold, warm);
}

TEST_F(WarmthTest, AModelThatWasDroppedIsRememberedAsWell) {
  decode("a", 5, 60);
  ASSERT_TRUE(daemon_->drop_model(daemon_->models().at(0).id));
  ASSERT_TRUE(std::filesystem::exists(state_file()));
  ASSERT_TRUE(daemon_->register_model({model_}));
  wait_until_full();
  EXPECT_EQ(decode("a", 5, 3), 3u * kLayers * kTopK);
}

TEST_F(WarmthTest, ASessionBeginsWithWhatItsLabelUsed) {
  decode("often", 0, 90);
  decode("seldom", 16, 9);
  restart();
  before_decoding_ = [this] { wait_until_full(); };
  // Eight experts of each layer were used more often than those, by others.
  EXPECT_GT(decode("seldom", 16, 1), 0u);
}

TEST_F(WarmthTest, DamagedAndForeignFilesAreIgnored) {
  const std::uint64_t cold = decode("a", 5, 3);
  decode("a", 5, 60);
  daemon_.reset();
  const std::filesystem::path file = state_file();
  {
    std::fstream stream(file, std::ios::in | std::ios::out);
    stream.seekp(-40, std::ios::end);
    stream.put('7').put('7').put('7');
  }
  start();
  ASSERT_TRUE(daemon_->register_model({model_}));
  EXPECT_EQ(decode("a", 5, 3), cold);
  EXPECT_EQ(daemon_->sessions().size(), 0u);
}

TEST_F(WarmthTest, PrewarmLoadsWhatAFileNames) {
  ASSERT_TRUE(daemon_->register_model({model_}));
  const std::string csv = folder_ / "counts.csv";
  {
    std::ofstream out(csv);
    out << "# moecounts-csv v1 {}\nworkload,layer,c0,c1,c2,c3,c4,c5,c6,c7,c8,c9\n";
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) out << "x," << layer << ",9,9,9,9,1,1,1,1,1,1\n";
  }
  const auto report = daemon_->prewarm(0, csv);
  ASSERT_TRUE(report) << report.error().text;
  EXPECT_EQ(report->layers, kLayers);
  EXPECT_EQ(report->experts, kLayers * kSlots);
  wait_until_full();
  EXPECT_EQ(decode("a", 0, 1), 4u + 4u + 4u);  // 0..3, 2..5, 4..7 of eight that were named first
  // A full pool: nothing is loaded in anybody's place.
  const auto again = daemon_->prewarm(0, csv);
  ASSERT_TRUE(again) << again.error().text;
  EXPECT_EQ(again->experts, 0u);
}

TEST_F(WarmthTest, PrewarmSaysWhyNot) {
  const auto none = daemon_->prewarm(0, folder_ / "x");
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().text.find("no model to prewarm"), std::string::npos) << none.error().text;
  ASSERT_TRUE(daemon_->register_model({model_}));
  EXPECT_EQ(daemon_->prewarm(99, model_).error().code, FaultCode::kNotFound);
  EXPECT_EQ(daemon_->prewarm(0, folder_ / "x").error().code, FaultCode::kNotFound);
  const auto not_counts = daemon_->prewarm(0, model_);
  ASSERT_FALSE(not_counts);
  EXPECT_NE(not_counts.error().text.find("not the imatrix"), std::string::npos) << not_counts.error().text;
  const std::string csv = folder_ / "counts.csv";
  std::ofstream(csv) << "# moecounts-csv v1 {}\nworkload,layer,c0\nx,77,1\n";
  const auto other = daemon_->prewarm(0, csv);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().text.find("another model's"), std::string::npos) << other.error().text;
}

}  // namespace
}  // namespace moecached
