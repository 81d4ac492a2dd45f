// The hooked graph compute against stock's on the same graph: equal bytes at every pool size, and the graph
// left as it was.
#include "shim/ggml/backend_hook.h"

#include <gtest/gtest.h>

#include <memory>

#include "shim/ggml/session.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::BackendHook;

constexpr uint32_t kLayers = 2;
constexpr uint32_t kExperts = 7;
constexpr uint64_t kRoomy = 1 << 20;

class BackendHookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    reset_fake_daemon();
    install_mini_host();
    shim::Session::instance().open();
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), kLayers, kExperts);
    stock_ = std::make_unique<LoadedModel>(*file_, kLayers, false);
  }

  void serve(uint32_t n_slots, uint64_t stream_half_bytes = kRoomy) {
    file_->serve(n_slots, stream_half_bytes);
    served_ = std::make_unique<LoadedModel>(*file_, kLayers, true);
  }

  // Two MoE layers, with a node between the operations of a layer that is no expert operation.
  static std::vector<ggml_tensor*> build(MiniGraph& graph, LoadedModel& model,
                                         const std::vector<std::vector<int32_t>>& routing) {
    std::vector<ggml_tensor*> results;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      auto shifted = routing;
      for (auto& row : shifted) {
        for (int32_t& id : row) id = (id + static_cast<int32_t>(layer)) % static_cast<int32_t>(kExperts);
      }
      ggml_tensor* ids = graph.ids(shifted, 11);
      const auto rows = static_cast<int64_t>(routing.size());
      ggml_tensor* input = graph.activations({ExpertFile::kIn, 1, rows}, 0.25f + static_cast<float>(layer));
      ggml_tensor* gate =
          graph.mul_mat_id(model.tensor(ExpertFile::name(layer, "gate_exps.weight")), input, ids);
      ggml_tensor* doubled = graph.scale(gate);
      ggml_tensor* up = graph.mul_mat_id(model.tensor(ExpertFile::name(layer, "up_exps.weight")), input, ids);
      ggml_tensor* down =
          graph.mul_mat_id(model.tensor(ExpertFile::name(layer, "down_exps.weight")), doubled, ids);
      ggml_tensor* biased = graph.add_id(down, model.tensor(ExpertFile::name(layer, "down_exps.bias")), ids);
      for (ggml_tensor* result : {gate, doubled, up, down, biased}) results.push_back(result);
    }
    return results;
  }

  // What stock computes for this routing.
  std::vector<std::vector<float>> expected(const std::vector<std::vector<int32_t>>& routing) {
    MiniGraph graph;
    const auto results = build(graph, *stock_, routing);
    MiniBackend backend;
    ggml_cgraph stock_graph = graph.graph();
    EXPECT_EQ(MiniBackend::compute(&backend.backend, &stock_graph), GGML_STATUS_SUCCESS);
    return values(results);
  }

  static std::vector<std::vector<float>> values(const std::vector<ggml_tensor*>& tensors) {
    std::vector<std::vector<float>> all;
    for (const ggml_tensor* tensor : tensors) all.push_back(MiniGraph::values(*tensor));
    return all;
  }

  // Runs the routing through a hook whose abort callback the backend has.
  ggml_status run(BackendHook& hook, MiniBackend& backend, MiniGraph& graph) {
    backend.abort = BackendHook::abort_callback;
    backend.abort_data = &hook;
    ggml_cgraph hooked_graph = graph.graph();
    return hook.compute(&hooked_graph);
  }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  std::unique_ptr<LoadedModel> stock_;
  std::unique_ptr<LoadedModel> served_;
};

const std::vector<std::vector<int32_t>> kToken = {{4, 1}};
// Seven rows that need all seven experts, some of them from several rows.
const std::vector<std::vector<int32_t>> kPrompt = {{0, 1}, {2, 3}, {4, 5}, {6, 0}, {3, 1}, {5, 2}, {6, 4}};

TEST_F(BackendHookTest, ComputesTheSameBytesAsStockAtEveryPoolSize) {
  for (uint32_t n_slots = 1; n_slots <= kExperts; ++n_slots) {
    serve(n_slots);
    MiniBackend backend;
    BackendHook hook(&backend.backend, MiniBackend::compute);
    for (const auto& routing : {kToken, kPrompt, kToken}) {
      MiniGraph graph;
      const auto results = build(graph, *served_, routing);
      ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS) << n_slots << " slots";
      EXPECT_EQ(values(results), expected(routing)) << n_slots << " slots";
    }
  }
}

TEST_F(BackendHookTest, CatchesAFlippedByteInASlot) {
  serve(kExperts);
  fake_daemon().flip_a_byte = true;
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  EXPECT_NE(values(results), expected(kToken)) << "a test that compares bytes would not see a wrong slot";
}

TEST_F(BackendHookTest, StreamsInAsManyWavesAsTheBufferNeeds) {
  // Room for two experts of a weight in each half.
  serve(1, 2 * ExpertFile::kIn * ExpertFile::kOut * 4);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  const auto results = build(graph, *served_, kPrompt);
  const uint64_t waves_before = shim::Session::instance().counters().waves;
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kPrompt));
  // Seven absent experts: four waves for each of three weights; the biases fit into one.
  EXPECT_EQ(shim::Session::instance().counters().waves - waves_before, kLayers * (3 * 4 + 1));
  EXPECT_EQ(fake_daemon().streamed, kLayers * 4 * kExperts);
}

TEST_F(BackendHookTest, TakesResidentExpertsFromTheirSlotsWhenABatchIsCut) {
  serve(2);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph first;
  build(first, *served_, kToken);
  ASSERT_EQ(run(hook, backend, first), GGML_STATUS_SUCCESS);
  MiniGraph second;
  build(second, *served_, kPrompt);
  ASSERT_EQ(run(hook, backend, second), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().streamed, kLayers * 4 * (kExperts - 2)) << "two of the experts were resident";
}

TEST_F(BackendHookTest, RunsAResidentGraphInOnePieceWithOneResolveALayer) {
  serve(kExperts);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  ASSERT_EQ(backend.computed.size(), graph.nodes().size() + kLayers);
  EXPECT_EQ(backend.computed[0]->op, GGML_OP_CUSTOM);
  EXPECT_EQ(backend.computed[1], graph.nodes()[0]);
  EXPECT_EQ(fake_daemon().reads, kLayers * kExperts) << "the callback of each thread resolved";
  EXPECT_EQ(fake_daemon().ends, 1u);
}

TEST_F(BackendHookTest, LeavesTheHostsNodesAsTheyWere) {
  serve(2);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  std::vector<ggml_tensor> before;
  for (const ggml_tensor* node : graph.nodes()) before.push_back(*node);
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  fake_daemon().resolve_status = MOECACHED_E_IO;
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_FAILED);
  for (std::size_t i = 0; i < before.size(); ++i) {
    for (int source = 0; source < GGML_MAX_SRC; ++source) {
      EXPECT_EQ(graph.nodes()[i]->src[source], before[i].src[source]) << "node " << i;
    }
  }
}

TEST_F(BackendHookTest, StopsAtTheNodeThatCouldNotBeResolved) {
  serve(kExperts);
  fake_daemon().resolve_status = MOECACHED_E_MODEL_CHANGED;
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  build(graph, *served_, kToken);
  EXPECT_EQ(run(hook, backend, graph), GGML_STATUS_FAILED);
  EXPECT_EQ(backend.computed.size(), 1u) << "nothing may be computed with slots that are not right";
}

TEST_F(BackendHookTest, ComputesNothingOutOfRangeWithoutAnAbortCallback) {
  serve(1);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  ggml_cgraph hooked_graph = graph.graph();
  EXPECT_EQ(hook.compute(&hooked_graph), GGML_STATUS_FAILED);  // the mini host throws on an id out of range
}

TEST_F(BackendHookTest, FailsWhenAWaveCannotBeRead) {
  serve(1);
  fake_daemon().stream_status = MOECACHED_E_IO;
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  EXPECT_EQ(run(hook, backend, graph), GGML_STATUS_FAILED);
  fake_daemon().stream_status = MOECACHED_OK;
  MiniGraph again;
  const auto results = build(again, *served_, kPrompt);
  ASSERT_EQ(run(hook, backend, again), GGML_STATUS_SUCCESS) << "the failure has left a half in use";
  EXPECT_EQ(values(results), expected(kPrompt));
}

TEST_F(BackendHookTest, HandsTheHostsAbortOn) {
  serve(1);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  int calls = 0;
  hook.set_host_abort([](void* count) { return ++*static_cast<int*>(count) == 4; }, &calls);
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  EXPECT_EQ(run(hook, backend, graph), GGML_STATUS_ABORTED);
  EXPECT_EQ(calls, 4);
}

TEST_F(BackendHookTest, FollowsWindowsThatMovedInAReconnect) {
  serve(3);
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  MiniGraph first;
  build(first, *served_, kToken);
  ASSERT_EQ(run(hook, backend, first), GGML_STATUS_SUCCESS);
  fake_daemon().connected = false;
  fake_daemon().move_windows();
  MiniGraph second;
  const auto results = build(second, *served_, kToken);
  ASSERT_EQ(run(hook, backend, second), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().reconnects, 1u);
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(BackendHookTest, ResolvesALayerAgainWhenAnotherOneCameBetween) {
  serve(kExperts);
  MiniGraph graph;
  ggml_tensor* ids = graph.ids(kToken, 2);
  ggml_tensor* input = graph.activations({ExpertFile::kIn, 1, 1}, 1);
  for (const uint32_t layer : {0u, 1u, 0u}) {
    graph.mul_mat_id(served_->tensor(ExpertFile::name(layer, "gate_exps.weight")), input, ids);
  }
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(backend.computed.size(), 6u) << "slots of a layer are good until the next layer is resolved";
}

TEST_F(BackendHookTest, LeavesNodesAloneThatStockWouldSkip) {
  serve(kExperts);
  MiniGraph graph;
  build(graph, *served_, kToken);
  for (ggml_tensor* node : graph.nodes()) node->flags = 0;
  MiniBackend backend;
  BackendHook hook(&backend.backend, MiniBackend::compute);
  ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
  EXPECT_TRUE(backend.computed.empty());
}

TEST_F(BackendHookTest, GivesItsLanesAndModelsBack) {
  serve(2);
  {
    MiniBackend backend;
    BackendHook hook(&backend.backend, MiniBackend::compute);
    MiniGraph graph;
    build(graph, *served_, kToken);
    ASSERT_EQ(run(hook, backend, graph), GGML_STATUS_SUCCESS);
    EXPECT_EQ(fake_daemon().open_lanes, 1u);
    EXPECT_EQ(fake_daemon().open_models, 1u) << "all tensors of a file belong to one model";
  }
  EXPECT_EQ(fake_daemon().open_lanes, 0u);
  served_.reset();
  EXPECT_EQ(fake_daemon().open_models, 0u);
}

}  // namespace
}  // namespace moecached::testing
