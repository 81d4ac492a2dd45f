// When device slots are added, and to which layers (gpu_daemon_fixture.h).
#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "tests/integration/gpu_daemon_fixture.h"

namespace moecached {
namespace {

class GpuGrowthTest : public GpuDaemonTest {
 protected:
  std::vector<std::uint32_t> slots() {
    std::vector<std::uint32_t> out;
    for (const LayerReport& layer : report().layers) out.push_back(layer.n_slots);
    return out;
  }
  std::vector<std::uint32_t> filled() {
    std::vector<std::uint32_t> out;
    for (const LayerReport& layer : report().layers) out.push_back(layer.resident);
    return out;
  }
};

using Slots = std::vector<std::uint32_t>;

TEST_F(GpuGrowthTest, OnlyLayersThatThisGpuComputesGetSlots) {
  start(kSix);
  GpuClient client(folder_, model_);
  client.use_of_layers({0, kExperts, kExperts});
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(1, 5);
    return filled() == Slots{0, 6, 6};
  }));
  EXPECT_EQ(slots(), (Slots{0, 6, 6}));
  EXPECT_EQ(out.wrong, 0u);
}

// As of a second server, which computes the rest of the model here. Ten seconds after the last growth.
TEST_F(GpuGrowthTest, LayersThatComeLaterGetTheirsUnderLanesThatGoOn) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  GpuClient first(folder_, model_), second(folder_, model_);
  first.use_of_layers({0, kExperts, kExperts});
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += first.graphs(1, 5);
    return slots() == Slots{0, 6, 6};
  }));
  EXPECT_TRUE(eventually([&] {
    for (int i = 0; i < 20; ++i) {
      out += first.graphs(2, 5);
      out += second.graphs(3, 5);
    }
    return slots() == Slots{6, 6, 6};
  }));
  std::uint64_t swaps = 0;
  EXPECT_TRUE(eventually([&] {
    out += first.graphs(4, 20);
    out += second.graphs(5, 20);
    swaps = report().layers[0].evictions;
    return swaps > 20;
  })) << swaps;
  EXPECT_EQ(out.wrong, 0u);
}

TEST_F(GpuGrowthTest, ALayerThatComesLaterAndFitsIsWhollyResidentAsStocksIs) {
  start(kAll);
  GpuClient client(folder_, model_);
  client.use_of_layers({0, kExperts, kExperts});
  GpuClient::Outcome out;
  const auto is_whole = [&](std::uint32_t layer) {
    moecached_gpu_layer_info info{};
    EXPECT_EQ(moecached_gpu_model_layer(client.model(), layer, &info), MOECACHED_OK);
    return info.all_resident != 0;
  };
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(1, 5);
    return is_whole(1) && is_whole(2);
  }));
  EXPECT_EQ(slots()[0], 0u);
  client.use_of_layers({kExperts, kExperts, kExperts});
  EXPECT_TRUE(eventually([&] {
    for (int i = 0; i < 20; ++i) out += client.graphs(2, 5);
    return is_whole(0);
  }));
  EXPECT_EQ(out.wrong, 0u);
}

// What a prompt logs: its last layer may be for fewer tokens.
TEST_F(GpuGrowthTest, TheLastLayerGetsSlotsWithTheOneBeforeIt) {
  start(kSix);
  GpuClient client(folder_, model_);
  client.use_of_layers({kExperts, kExperts, 0});
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(client.graphs(1, 5).wrong, 0u);
    return slots() == Slots{6, 6, 6};
  }));
}

TEST_F(GpuGrowthTest, WithScopeGlobalTheRestGoesToTheLayersThatNeedIt) {
  // Four of a small layer's experts are ever used, all of the others': a share of 8 slots each is too many
  // there.
  start({.kind = SlotsSpec::Kind::kCount, .value = 8}, 100, "ewma", false, SlotScope::kGlobal);
  GpuClient client(folder_, model_);
  client.use_of_layers({kTopK, kExperts, kExperts});
  GpuClient::Outcome out;
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(1, 2);
    return slots() == Slots{6, 6, 6};
  })) << "three quarters come first";
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(2, 20);
    return slots() != Slots{6, 6, 6};
  }));
  const Slots now = slots();
  EXPECT_EQ(std::accumulate(now.begin(), now.end(), 0u), 24u) << "as many as an even share has";
  EXPECT_EQ(now[0], 6u) << "which holds everything that it uses";
  EXPECT_GE(now[1], 8u);
  EXPECT_GE(now[2], 8u);
  EXPECT_TRUE(eventually([&] {
    out += client.graphs(3, 20);
    return filled()[1] == now[1] && filled()[2] == now[2];
  })) << "the new ones are used";
  EXPECT_EQ(out.wrong, 0u);
}

}  // namespace
}  // namespace moecached
