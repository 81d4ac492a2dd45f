// The planner on graphs built by hand: where nodes are inserted, what they look like, and that the host's
// graph is as before afterwards.
#include "shim/ggml/cuda_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>

#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::CudaPlan;
using shim::GpuModel;
using shim::GpuWindow;
using shim::SlotsMemory;
using shim::SlotsNodePool;

constexpr int64_t kExperts = 7;
constexpr int64_t kSlots = 10;
constexpr uint32_t kUsed = 2;

const GpuModel* model_of(uintptr_t number) { return reinterpret_cast<const GpuModel*>(number); }

class CudaPlanTest : public ::testing::Test {
 protected:
  // A weight of ours, or a bias; layers of a model have a table each.
  ggml_tensor* weight(uint32_t layer, uintptr_t model = 1, bool bias = false) {
    ggml_tensor* tensor =
        bias ? graph_.tensor(GGML_TYPE_F32, {8, kExperts}) : graph_.tensor(GGML_TYPE_F32, {8, 8, kExperts});
    GpuWindow& window = windows_[tensor];
    window.model = model_of(model);
    window.layer = layer;
    window.n_expert_used = kUsed;
    window.n_experts = kExperts;
    window.table = 0x1000 * model + 0x10 * layer;
    window.tensor = *tensor;
    window.tensor.ne[bias ? 1 : 2] = kSlots;
    window.tensor.buffer = buffer(1);
    window.fetches = true;
    window.fetched = window.tensor;
    window.fetched.ne[bias ? 1 : 2] = kSlots + 9;
    return tensor;
  }
  static ggml_backend_buffer_t buffer(std::size_t number) {
    static std::array<ggml_backend_buffer, 4> buffers = {};
    return &buffers[number];
  }
  ggml_tensor* ids(std::size_t columns = kUsed, std::size_t tokens = 1) {
    return graph_.ids(std::vector<std::vector<int32_t>>(tokens, std::vector<int32_t>(columns, 3)),
                      columns + 5);
  }
  ggml_tensor* input(int64_t tokens = 1) { return graph_.activations({8, 1, tokens}, 1); }

  void find(const ggml_cgraph& graph) {
    plan_.find(graph, [this](const ggml_tensor& tensor) -> const GpuWindow* {
      const auto found = windows_.find(&tensor);
      return found == windows_.end() ? nullptr : &found->second;
    });
  }
  void place(uint64_t address = 0x100000, uint32_t n_scratch = 0, uint64_t generation = 0) {
    memory_.clear();
    for (std::size_t i = 0; i < plan_.shares().size(); ++i) {
      memory_.push_back(
          {address + i * 0x10000, plan_.shares()[i].slots_bytes(), buffer(2), n_scratch, generation});
    }
    plan_.place(memory_, pool_);
  }

  MiniGraph graph_;
  std::map<const ggml_tensor*, GpuWindow> windows_;
  std::vector<SlotsMemory> memory_;
  SlotsNodePool pool_;
  CudaPlan plan_;
};

TEST_F(CudaPlanTest, InsertsOneNodeALayerRightBeforeTheFirstExpertOperation) {
  ggml_tensor* routed = ids();
  ggml_tensor* x = input();
  graph_.scale(x);  // stands for the top-k chain, which must stay whole
  ggml_tensor* weights = graph_.scale(x);
  ggml_tensor* up = graph_.mul_mat_id(weight(4), x, routed);
  ggml_tensor* gate = graph_.mul_mat_id(weight(4), x, routed);
  ggml_tensor* down = graph_.mul_mat_id(weight(4), graph_.scale(gate), routed);
  graph_.add_id(down, weight(4, 1, true), routed);
  const ggml_cgraph graph = graph_.graph();
  find(graph);
  place();
  ASSERT_EQ(plan_.nodes().size(), graph_.nodes().size() + 1);
  EXPECT_EQ(plan_.nodes()[1], weights);
  EXPECT_EQ(plan_.nodes()[2]->op, GGML_OP_GET_ROWS);
  EXPECT_EQ(plan_.nodes()[3], up);
}

TEST_F(CudaPlanTest, SharesOneIdsTensorBetweenTheOperationsOfALayer) {
  ggml_tensor* routed = ids();
  ggml_tensor* gate = graph_.mul_mat_id(weight(0), input(), routed);
  ggml_tensor* up = graph_.mul_mat_id(weight(0), input(), routed);
  ggml_tensor* biased = graph_.add_id(up, weight(0, 1, true), routed);
  const ggml_tensor* gate_weight = gate->src[0];
  const ggml_tensor* bias = biased->src[1];
  const ggml_cgraph graph = graph_.graph();
  find(graph);
  place();
  plan_.swap();
  EXPECT_EQ(gate->src[0], &windows_[gate_weight].tensor);
  EXPECT_EQ(biased->src[1], &windows_[bias].tensor);
  EXPECT_EQ(biased->src[0], up) << "only the weight and the ids are swapped";
  EXPECT_NE(gate->src[2], routed);
  EXPECT_EQ(up->src[2], gate->src[2]) << "fused kernels compare the pointers";
  EXPECT_EQ(biased->src[2], gate->src[2]);
  plan_.restore();
}

TEST_F(CudaPlanTest, MakesNodesThatStockComputes) {
  ggml_tensor* routed = ids(kUsed, 3);
  ggml_tensor* node = graph_.mul_mat_id(weight(5), input(3), routed);
  find(graph_.graph());
  place(0x40000);
  plan_.swap();
  const ggml_tensor& slots = *plan_.nodes()[0];
  EXPECT_NE(slots.flags & GGML_TENSOR_FLAG_COMPUTE, 0) << "stock skips it in silence";
  EXPECT_EQ(slots.type, GGML_TYPE_I32);
  EXPECT_EQ(slots.src[1], routed);
  EXPECT_EQ(slots.buffer, buffer(2));
  EXPECT_EQ(slots.data, reinterpret_cast<void*>(0x40000));
  EXPECT_EQ((std::array{slots.ne[0], slots.ne[1], slots.ne[2]}), (std::array<int64_t, 3>{1, kUsed, 3}));
  const ggml_tensor& table = *slots.src[0];
  EXPECT_EQ((std::array{table.ne[0], table.ne[1], table.ne[2]}), (std::array<int64_t, 3>{1, kExperts, 3}));
  EXPECT_EQ(table.nb[2], 0u) << "every token looks into the same table";
  EXPECT_EQ(table.data, reinterpret_cast<void*>(0x1000 + 0x50));
  EXPECT_EQ(table.buffer, buffer(1));
  const ggml_tensor& view = *node->src[2];
  EXPECT_EQ(view.view_src, &slots);
  EXPECT_EQ(view.data, slots.data);
  EXPECT_NE(view.buffer, nullptr);
  EXPECT_EQ(view.ne[0], static_cast<int64_t>(kUsed));
  EXPECT_EQ(view.ne[1], 3);
  EXPECT_EQ(view.nb[1], kUsed * 4u);
  plan_.restore();
}

TEST_F(CudaPlanTest, LeavesTheHostsGraphAsItWas) {
  ggml_tensor* routed = ids();
  graph_.add_id(graph_.mul_mat_id(weight(0), input(), routed), weight(0, 1, true), routed);
  graph_.mul_mat_id(weight(1), input(), ids());
  const ggml_cgraph graph = graph_.graph();
  std::vector<ggml_tensor> before;
  for (const ggml_tensor* node : graph_.nodes()) before.push_back(*node);
  find(graph);
  place();
  plan_.swap();
  plan_.restore();
  EXPECT_EQ(graph.n_nodes, static_cast<int>(before.size()));
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(std::memcmp(graph.nodes[i], &before[i], sizeof(ggml_tensor)), 0) << "node " << i;
  }
}

TEST_F(CudaPlanTest, KeepsTheHostsHashSetAndUseCounts) {
  graph_.mul_mat_id(weight(0), input(), ids());
  ggml_cgraph graph = graph_.graph();
  int32_t use_counts[4] = {};
  graph.use_counts = use_counts;
  graph.visited_hash_set.size = 4;
  find(graph);
  place();
  const ggml_cgraph planned = plan_.graph(graph);
  EXPECT_EQ(planned.use_counts, use_counts);
  EXPECT_EQ(planned.visited_hash_set.size, 4u);
  EXPECT_EQ(planned.n_nodes, 2);
  EXPECT_GE(planned.size, 2);
}

TEST_F(CudaPlanTest, LeavesOtherTensorsAndSkippedNodesAlone) {
  graph_.mul_mat_id(graph_.tensor(GGML_TYPE_F32, {8, 8, kExperts}), input(), ids());
  graph_.mul_mat_id(weight(0), input(), ids())->flags = 0;
  ggml_tensor* nothing = ids();
  nothing->ne[1] = 0;
  graph_.mul_mat_id(weight(1), input(), nothing);
  find(graph_.graph());
  EXPECT_TRUE(plan_.empty());
  EXPECT_TRUE(plan_.shares().empty());
}

TEST_F(CudaPlanTest, GivesEachLayerARowOfTheSlots) {
  for (const uint32_t layer : {3u, 8u, 9u}) graph_.mul_mat_id(weight(layer), input(40), ids(kUsed, 40));
  find(graph_.graph());
  ASSERT_EQ(plan_.shares().size(), 1u);
  const CudaPlan::Share& share = plan_.shares()[0];
  EXPECT_EQ(share.layers, (std::vector<uint16_t>{3, 8, 9}));
  EXPECT_EQ(share.n_tokens, 40u);
  EXPECT_EQ(share.pitch_bytes, 512u) << "40 x 2 ids, aligned";
  EXPECT_EQ(share.slots_bytes(), 3 * 512u);
  place(0x2000);
  EXPECT_EQ(plan_.nodes()[4]->data, reinterpret_cast<void*>(0x2000 + 2 * 512));
}

TEST_F(CudaPlanTest, LogsTheLayersThatComputeAllTokens) {
  // Only the last token's output is wanted, so the last layer computes no other. Put first, to see it moved.
  graph_.mul_mat_id(weight(9), input(1), ids(kUsed, 1));
  graph_.mul_mat_id(weight(0), input(5), ids(kUsed, 5));
  graph_.mul_mat_id(weight(1), input(5), ids(kUsed, 5));
  find(graph_.graph());
  const CudaPlan::Share& share = plan_.shares()[0];
  EXPECT_EQ(share.layers, (std::vector<uint16_t>{0, 1}));
  EXPECT_EQ(share.n_tokens, 5u);
  EXPECT_EQ(share.n_rows, 3u);
  place(0x2000);
  EXPECT_EQ(plan_.nodes()[0]->data, reinterpret_cast<void*>(0x2000 + 2 * 256))
      << "behind the rows that are logged";
  EXPECT_EQ(plan_.nodes()[2]->data, reinterpret_cast<void*>(0x2000));
}

TEST_F(CudaPlanTest, LogsNothingOfAWarmUpThatAsksForAllExperts) {
  graph_.mul_mat_id(weight(0), input(), ids(kExperts));
  find(graph_.graph());
  EXPECT_FALSE(plan_.empty());
  EXPECT_TRUE(plan_.shares()[0].layers.empty());
}

TEST_F(CudaPlanTest, KeepsTwoModelsApartThoughTheirLayersHaveEqualNumbers) {
  ggml_tensor* routed = ids();
  ggml_tensor* first = graph_.mul_mat_id(weight(0, 1), input(), routed);
  ggml_tensor* second = graph_.mul_mat_id(weight(0, 2), input(), routed);
  find(graph_.graph());
  place();
  ASSERT_EQ(plan_.shares().size(), 2u);
  EXPECT_EQ(plan_.nodes().size(), 4u);
  plan_.swap();
  EXPECT_NE(first->src[2], second->src[2]);
  EXPECT_NE(first->src[2]->data, second->src[2]->data);
  plan_.restore();
}

TEST_F(CudaPlanTest, KnowsItsGraphByNumberNodesAndCount) {
  graph_.mul_mat_id(weight(0), input(), ids());
  ggml_cgraph graph = graph_.graph();
  find(graph);
  EXPECT_TRUE(plan_.is_for(graph));
  ggml_cgraph other = graph;
  other.uid += 1;
  EXPECT_FALSE(plan_.is_for(other));
  other = graph;
  other.n_nodes = 0;
  EXPECT_FALSE(plan_.is_for(other));
  other = graph;
  ggml_tensor* moved[] = {graph.nodes[0]};
  other.nodes = moved;
  EXPECT_FALSE(plan_.is_for(other));
}

TEST_F(CudaPlanTest, HidesTheNumberFromStockOnceAfterEachPlacing) {
  graph_.mul_mat_id(weight(0), input(), ids());
  const ggml_cgraph graph = graph_.graph();
  find(graph);
  for (const uint64_t address : {0x1000u, 0x2000u}) {
    place(address);
    EXPECT_EQ(plan_.graph(graph).uid, 0u) << "stock may have captured other addresses under this number";
    EXPECT_EQ(plan_.graph(graph).uid, graph.uid);
  }
}

TEST_F(CudaPlanTest, PutsACopyBehindTheLookUpForAFewTokens) {
  ggml_tensor* routed = ids(kUsed, 3);
  ggml_tensor* gate = graph_.mul_mat_id(weight(5), input(3), routed);
  const ggml_tensor* gate_weight = gate->src[0];
  find(graph_.graph());
  EXPECT_EQ(plan_.shares()[0].n_fetchable, 1u);
  place(0x40000, 6, 11);
  ASSERT_EQ(plan_.nodes().size(), 3u);
  const ggml_tensor& slots = *plan_.nodes()[0];
  const ggml_tensor& copy = *plan_.nodes()[1];
  EXPECT_EQ(copy.op, GGML_OP_CONT);
  EXPECT_EQ(copy.src[0], &slots);
  EXPECT_NE(copy.flags & GGML_TENSOR_FLAG_COMPUTE, 0);
  EXPECT_EQ((std::array{copy.ne[0], copy.ne[1], copy.ne[2]}), (std::array<int64_t, 3>{1, kUsed, 3}));
  EXPECT_EQ(copy.data, reinterpret_cast<void*>(0x40000 + 256));
  ASSERT_EQ(plan_.fetches().size(), 1u);
  EXPECT_EQ(plan_.fetches()[0].fetched, 0x40000u + 256);
  EXPECT_EQ(plan_.fetches()[0].slots, 0x40000u);
  EXPECT_EQ(plan_.fetches()[0].n_ids, 6u);
  EXPECT_EQ(plan_.fetches()[0].layer, 5u);
  plan_.swap();
  EXPECT_EQ(gate->src[0], &windows_[gate_weight].fetched);
  EXPECT_EQ(gate->src[2]->data, copy.data);
  plan_.restore();
}

TEST_F(CudaPlanTest, FetchesNothingWithoutScratchSlotsForAllIds) {
  graph_.mul_mat_id(weight(0), input(3), ids(kUsed, 3));
  graph_.mul_mat_id(weight(1), input(9), ids(kUsed, 9));
  find(graph_.graph());
  EXPECT_EQ(plan_.shares()[0].n_fetchable, 1u) << "nine tokens are a prompt";
  for (const uint32_t n_scratch : {0u, 5u}) {
    place(0x40000, n_scratch, 11);
    EXPECT_EQ(plan_.nodes().size(), 4u);
    EXPECT_TRUE(plan_.fetches().empty());
  }
  place(0x40000, 64, 11);
  EXPECT_EQ(plan_.fetches().size(), 1u);
}

TEST_F(CudaPlanTest, MakesOtherNodesForOtherScratchSlots) {
  graph_.mul_mat_id(weight(0), input(), ids());
  find(graph_.graph());
  place(0x1000, 8, 11);
  const ggml_tensor before = *plan_.nodes()[1];
  EXPECT_FALSE(
      plan_.is_placed(std::array{SlotsMemory{0x1000, plan_.shares()[0].slots_bytes(), buffer(2), 8, 12}}));
  place(0x1000, 8, 12);
  EXPECT_NE(std::memcmp(&before, plan_.nodes()[1], sizeof before), 0)
      << "stock would launch what it captured with the old windows";
}

TEST_F(CudaPlanTest, PutsEqualNodesAtEqualAddresses) {
  graph_.mul_mat_id(weight(0), input(), ids());
  const ggml_cgraph graph = graph_.graph();
  find(graph);
  place();
  const ggml_tensor* node = plan_.nodes()[0];
  ggml_cgraph rebuilt = graph;
  rebuilt.uid = 78;
  find(rebuilt);
  place();
  EXPECT_EQ(plan_.nodes()[0], node) << "stock would capture its CUDA graph again";
  place(0x7000);
  EXPECT_NE(plan_.nodes()[0], node);
  EXPECT_EQ(pool_.size(), 2u);
}

}  // namespace
}  // namespace moecached::testing
