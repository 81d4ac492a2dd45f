// The real client and the real daemon in one process, so that the sanitizers see both sides: a model of three
// layers, a daemon whose pool is much too small for it, and clients that compare every byte of every slot
// with what the file holds.
#pragma once

#include <gtest/gtest.h>
#include <moecached/moecached.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/ipc/daemon.h"
#include "tests/integration/slot_bytes.h"
#include "tests/support/gguf_builder.h"

namespace moecached {

inline constexpr std::uint32_t kExperts = 16;
inline constexpr std::uint32_t kTopK = 4;

class ClientDaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/moecached-client-daemon-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_ = folder_ / "model.gguf";
    test::write_file(
        model_, test::make_moe({.n_layers = 3, .n_experts = kExperts, .n_expert_used = kTopK, .biases = true})
                    .build()
                    .bytes);
    start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(SlotsSpec slots, SlotScope scope = SlotScope::kGlobal) {
    Config config;
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.pool_bytes = 64u << 20;
    config.slots = slots;
    config.slot_scope = scope;
    config.policy_directory = policy_directory_;
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
  }

  std::filesystem::path folder_, model_;
  std::string policy_directory_;
  std::unique_ptr<Daemon> daemon_;
};

// One client: a session of its own, or a lane of a shared one.
class Client {
 public:
  Client(const std::filesystem::path& folder, const std::filesystem::path& model)
      : Client(folder, std::vector<std::filesystem::path>{model}) {}
  Client(const std::filesystem::path& folder, const std::vector<std::filesystem::path>& files) {
    EXPECT_EQ(moecached_session_open((folder / "handle.sock").c_str(), "test", &session_), MOECACHED_OK)
        << moecached_last_error();
    std::vector<const char*> paths;
    for (const auto& file : files) paths.push_back(file.c_str());
    EXPECT_EQ(moecached_model_open(session_, paths.data(), paths.size(), &model_), MOECACHED_OK)
        << moecached_last_error();
    EXPECT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
  }
  ~Client() {
    moecached_lane_close(lane_);
    moecached_model_close(model_);
    moecached_session_close(session_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Bytes of `slot` that differ from expert `id` of the file.
  std::size_t wrong_bytes(std::uint32_t layer, std::int32_t id, std::int32_t slot) const {
    return test::wrong_bytes_in_slot(model_, layer, id, slot);
  }

  // `rounds` tokens with random experts; returns how many bytes were wrong.
  std::size_t decode(std::uint32_t seed, int rounds) {
    std::mt19937 random(seed);
    std::size_t wrong = 0;
    for (int i = 0; i < rounds; ++i) {
      for (std::uint32_t layer = 0; layer < moecached_model_layers(model_); ++layer) {
        std::int32_t ids[kTopK], slots[kTopK];
        for (auto& id : ids) id = static_cast<std::int32_t>(random() % kExperts);
        const auto status = moecached_lane_resolve(lane_, layer, ids, 1, kTopK, 0, slots);
        EXPECT_EQ(status, MOECACHED_OK) << moecached_last_error();
        if (status != MOECACHED_OK) return wrong + 1;
        for (std::size_t k = 0; k < kTopK; ++k) wrong += wrong_bytes(layer, ids[k], slots[k]);
      }
      moecached_lane_end(lane_);
    }
    return wrong;
  }

  // A prompt of 64 rows over `n_distinct` random experts. Counts what it was told.
  void prompt(std::mt19937& random, std::uint32_t layer, std::uint32_t n_distinct) {
    std::vector<std::int32_t> all(kExperts), ids, slots;
    for (std::uint32_t i = 0; i < kExperts; ++i) all[i] = static_cast<std::int32_t>(i);
    std::shuffle(all.begin(), all.end(), random);
    for (std::uint32_t i = 0; i < 64; ++i) ids.push_back(all[i % n_distinct]);
    slots.resize(ids.size());
    const auto status =
        moecached_lane_resolve(lane_, layer, ids.data(), ids.size(), 1, sizeof(std::int32_t), slots.data());
    EXPECT_TRUE(status == MOECACHED_OK || status == MOECACHED_E_TOO_MANY) << moecached_last_error();
    ++(status == MOECACHED_OK ? prompts_granted : prompts_told_to_stream);
    for (std::size_t i = 0; status == MOECACHED_OK && i < n_distinct; ++i)
      prompts_wrong_bytes += wrong_bytes(layer, ids[i], slots[i]);
    moecached_lane_end(lane_);
  }
  std::size_t prompts_granted = 0, prompts_told_to_stream = 0, prompts_wrong_bytes = 0;

  moecached_counters counters() const {
    moecached_counters out{};
    moecached_model_counters(model_, &out);
    return out;
  }
  moecached_lane* lane() { return lane_; }
  moecached_model* model() { return model_; }
  moecached_session* session() { return session_; }

 private:
  moecached_session* session_ = nullptr;
  moecached_model* model_ = nullptr;
  moecached_lane* lane_ = nullptr;
};

}  // namespace moecached
