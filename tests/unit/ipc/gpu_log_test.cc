#include "daemon/ipc/gpu_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace moecached {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint32_t kLayers = 3, kTopK = 2, kEntries = 4;

class GpuLogTest : public ::testing::Test {
 protected:
  static moecached_shm_gpu geometry() {
    moecached_shm_gpu out{};
    out.log_entries = kEntries;
    out.log_layer_bytes = MOECACHED_LOG_TOKENS * kTopK * sizeof(std::int32_t);
    out.log_slots_offset = 128;
    out.log_entry_bytes = out.log_slots_offset + kLayers * out.log_layer_bytes;
    return out;
  }
  // What a client and its GPU write.
  void put(moecached_shm_log_entry header, std::initializer_list<std::uint16_t> layers) {
    std::byte* at = log_.data() + header.epoch % kEntries * geometry().log_entry_bytes;
    std::memcpy(at, &header, sizeof header);
    if (layers.size() > 0)  // an empty list has no address
      std::memcpy(at + sizeof header, layers.begin(), layers.size() * sizeof(std::uint16_t));
    for (std::uint32_t row = 0; row < layers.size(); ++row) {
      for (std::int32_t i = 0; i < static_cast<std::int32_t>(header.n_tokens * kTopK) && i < 64; ++i) {
        const std::int32_t slot = static_cast<std::int32_t>(row) * 100 + i;
        std::memcpy(at + geometry().log_slots_offset + row * geometry().log_layer_bytes + i * 4, &slot,
                    sizeof slot);
      }
    }
  }
  static moecached_shm_log_entry header(std::uint32_t n_layers, std::uint32_t n_whole,
                                        std::uint32_t n_tokens) {
    moecached_shm_log_entry out{};
    out.epoch = 6;
    out.n_layers = n_layers;
    out.n_whole = n_whole;
    out.n_tokens = n_tokens;
    return out;
  }

  std::vector<std::byte> log_ = std::vector<std::byte>(kEntries * geometry().log_entry_bytes);
  GpuLogReader reader_{geometry(), kLayers, kTopK};
};

TEST_F(GpuLogTest, RowsComeTokenByToken) {
  put(header(2, 1, 2), {1, MOECACHED_LOG_BY_EXPERT | 0, 2});
  ASSERT_EQ(reader_.read(log_, 6), GpuLogOutcome::kEntry);
  EXPECT_THAT(reader_.whole(), ElementsAre(LayerIndex(2)));
  ASSERT_EQ(reader_.rows().size(), 2u);
  EXPECT_EQ(reader_.rows()[0].layer, LayerIndex(1));
  EXPECT_FALSE(reader_.rows()[0].by_expert);
  EXPECT_EQ(reader_.rows()[1].layer, LayerIndex(0));
  EXPECT_TRUE(reader_.rows()[1].by_expert);
  EXPECT_THAT(reader_.slots(0, 1), ElementsAre(2, 3));
  EXPECT_THAT(reader_.slots(1, 0), ElementsAre(100, 101));
}

TEST_F(GpuLogTest, AnEntryOfAnotherEpochIsNone) {
  put(header(1, 0, 1), {0});
  EXPECT_EQ(reader_.read(log_, 2), GpuLogOutcome::kNone);
  EXPECT_EQ(reader_.read(log_, 10), GpuLogOutcome::kNone);
}

TEST_F(GpuLogTest, CountsAndLayersOutOfRangeAreRefused) {
  const auto refused = [&](moecached_shm_log_entry header, std::initializer_list<std::uint16_t> layers) {
    put(header, layers);
    return reader_.read(log_, 6) == GpuLogOutcome::kRefused;
  };
  EXPECT_TRUE(refused(header(0, 0, 1), {}));
  EXPECT_TRUE(refused(header(1, 0, 0), {0}));
  EXPECT_TRUE(refused(header(1, 0, MOECACHED_LOG_TOKENS + 1), {0}));
  EXPECT_TRUE(refused(header(kLayers + 1, 0, 1), {0}));
  EXPECT_TRUE(refused(header(2, 2, 1), {0}));
  EXPECT_TRUE(refused(header(0xffffffff, 2, 1), {0}));  // the sum wraps
  EXPECT_TRUE(refused(header(1, 0, 1), {kLayers}));
  EXPECT_TRUE(refused(header(0, 1, 1), {MOECACHED_LOG_BY_EXPERT | 0}));  // of rows alone
  EXPECT_FALSE(refused(header(1, 0, MOECACHED_LOG_TOKENS), {0}));
}

}  // namespace
}  // namespace moecached
