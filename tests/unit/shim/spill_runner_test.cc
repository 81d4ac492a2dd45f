// Graphs of a model that spills, on a mini GPU: the bytes of stock, where the graph is cut, and what the
// client is told.
#include "shim/ggml/spill_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "shim/ggml/cuda_backend_hook.h"
#include "shim/ggml/session.h"
#include "tests/unit/shim/fake_backend_copy.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_gpu.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::CudaBackendHook;
using shim::Session;
using Calls = std::vector<std::string>;
using Routing = std::vector<std::vector<int32_t>>;

constexpr uint32_t kLayers = 2;
constexpr uint32_t kExperts = 7;

class SpillRunnerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("MOECACHED_LIBCUDA", FAKE_LIBCUDA, 1);
    reset_fake_daemon();
    mini_gpu_faults() = {};
    install_mini_host();
    fake_daemon().gpu_status = MOECACHED_E_SPILL;
    Session::instance().open();
    Session::instance().use_gpu(mini_gpu(0));
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), kLayers, kExperts);
    file_->serve(kExperts, 1 << 20);
    stock_ = std::make_unique<LoadedModel>(*file_, kLayers, false);
    served_ = std::make_unique<LoadedModel>(*file_, kLayers, true);
    make_gpu_backend(mini_, mini_gpu(0));
    hook_ = std::make_unique<CudaBackendHook>(&mini_.backend, mini_.backend.iface);
    fake_daemon().calls.clear();
  }
  void TearDown() override {
    hook_.reset();
    served_.reset();
    EXPECT_EQ(fake_daemon().open_lanes, 0u);
    EXPECT_EQ(fake_daemon().open_models, 0u);
    EXPECT_EQ(mini_gpu_buffers(), 0u);
    EXPECT_EQ(mini_gpu_events(), 0u);
    Session::instance().use_gpu(nullptr);
  }

  static std::vector<ggml_tensor*> build(MiniGraph& graph, LoadedModel& model, const Routing& routing) {
    std::vector<ggml_tensor*> results;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      auto shifted = routing;
      for (auto& row : shifted) {
        for (int32_t& id : row) id = (id + static_cast<int32_t>(layer)) % static_cast<int32_t>(kExperts);
      }
      ggml_tensor* ids = graph.ids(shifted, 11);
      const auto rows = static_cast<int64_t>(routing.size());
      ggml_tensor* input = graph.activations({ExpertFile::kIn, 1, rows}, 0.25f + static_cast<float>(layer));
      const auto weight = [&](const char* part) { return model.tensor(ExpertFile::name(layer, part)); };
      ggml_tensor* before = graph.scale(input);
      ggml_tensor* gate = graph.mul_mat_id(weight("gate_exps.weight"), input, ids);
      ggml_tensor* doubled = graph.scale(gate);
      ggml_tensor* up = graph.mul_mat_id(weight("up_exps.weight"), input, ids);
      ggml_tensor* down = graph.mul_mat_id(weight("down_exps.weight"), doubled, ids);
      ggml_tensor* biased = graph.add_id(down, weight("down_exps.bias"), ids);
      for (ggml_tensor* result : {before, gate, doubled, up, down, biased}) results.push_back(result);
    }
    return results;
  }
  static std::vector<std::vector<float>> values(const std::vector<ggml_tensor*>& tensors) {
    std::vector<std::vector<float>> all;
    for (const ggml_tensor* tensor : tensors) all.push_back(MiniGraph::values(*tensor));
    return all;
  }
  std::vector<std::vector<float>> expected(const Routing& routing) {
    MiniGraph graph;
    const auto results = build(graph, *stock_, routing);
    MiniBackend backend;
    ggml_cgraph stock_graph = graph.graph();
    EXPECT_EQ(MiniBackend::compute(&backend.backend, &stock_graph), GGML_STATUS_SUCCESS);
    return values(results);
  }
  ggml_status run(MiniGraph& graph, uint64_t uid = 77) {
    ggml_cgraph hooked_graph = graph.graph();
    hooked_graph.uid = uid;
    return hook_->compute(&hooked_graph);
  }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  std::unique_ptr<LoadedModel> stock_;
  std::unique_ptr<LoadedModel> served_;
  MiniBackend mini_;
  std::unique_ptr<CudaBackendHook> hook_;
};

const Routing kToken = {{4, 1}};
const Routing kPrompt = {{0, 1}, {2, 3}, {4, 5}, {6, 0}, {3, 1}, {5, 2}, {6, 4}, {1, 2}, {0, 6}};

TEST_F(SpillRunnerTest, OpensTheModelToSpillWhenTheDaemonSaysSo) {
  EXPECT_EQ(fake_daemon().open_models, 1u);
  EXPECT_TRUE(Session::instance().has_spilled());
}

TEST_F(SpillRunnerTest, ComputesTheSameBytesAsStock) {
  uint64_t uid = 1;
  for (const auto& routing : {kToken, kPrompt, kToken, Routing{{0, 1}, {2, 3}, {6, 5}}, kPrompt}) {
    MiniGraph graph;
    const auto results = build(graph, *served_, routing);
    ASSERT_EQ(run(graph, uid++), GGML_STATUS_SUCCESS);
    EXPECT_EQ(values(results), expected(routing));
  }
}

TEST_F(SpillRunnerTest, CatchesAFlippedByte) {
  for (const auto& routing : {kToken, kPrompt}) {
    fake_daemon().flip_a_byte = true;
    MiniGraph graph;
    const auto results = build(graph, *served_, routing);
    ASSERT_EQ(run(graph, 0), GGML_STATUS_SUCCESS);
    EXPECT_NE(values(results), expected(routing)) << "a test that compares bytes would not see a wrong slot";
  }
}

TEST_F(SpillRunnerTest, StopsAtEachLayerForATokenAndEndsWhenAllIsComputed) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().calls,
            (Calls{"compute", "get", "synchronize", "resolve", "event_wait", "compute", "get", "synchronize",
                   "resolve", "event_wait", "compute", "synchronize", "end"}));
  EXPECT_EQ(mini_.computed.size(), graph.nodes().size());
}

TEST_F(SpillRunnerTest, ComputesAPromptOperationByOperationAsItsPartsCome) {
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  Calls layer = {"compute", "get", "synchronize", "begin_layer"};
  for (int part = 0; part < 4; ++part) layer.insert(layer.end(), {"load_part", "event_wait", "compute"});
  Calls both = layer;
  both.insert(both.end(), layer.begin(), layer.end());
  both.insert(both.end(), {"synchronize", "end"});
  EXPECT_EQ(fake_daemon().calls, both);
}

TEST_F(SpillRunnerTest, LoadsPartsForATokenWhoseExpertsDoNotFit) {
  fake_daemon().resolve_status = MOECACHED_E_TOO_MANY;
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  const auto n = std::ranges::count(fake_daemon().calls, "compute");
  EXPECT_EQ(n, 2 * kLayers) << "gate, up and down of a token are fused by stock, so the layer is one piece";
}

TEST_F(SpillRunnerTest, LeavesTheHostsNodesAsTheyWere) {
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  std::vector<ggml_tensor> before;
  for (const ggml_tensor* node : graph.nodes()) before.push_back(*node);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  fake_daemon().stream_status = MOECACHED_E_IO;
  ASSERT_EQ(run(graph), GGML_STATUS_FAILED);
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_EQ(std::memcmp(graph.nodes()[i], &before[i], sizeof before[i]), 0) << "node " << i;
}

TEST_F(SpillRunnerTest, EndsWhatItBeganWhenSomethingFails) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  fake_daemon().resolve_status = MOECACHED_E_IO;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_EQ(fake_daemon().calls.back(), "end");
  fake_daemon().resolve_status = MOECACHED_OK;
  mini_gpu_faults().compute = GGML_STATUS_FAILED;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_EQ(fake_daemon().calls.back(), "end");
}

TEST_F(SpillRunnerTest, StockIsToldTheNumberOfAGraphAgainOnceItsPiecesAreTheSame) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  // The first piece has nothing of ours; in the others the sources are new to stock.
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{77, 0, 0}));
  mini_.uids.clear();
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{77, 77, 77}));
  mini_.uids.clear();
  fake_daemon().move_spill_windows();
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{77, 0, 0})) << "what stock captured has the old addresses";
  EXPECT_EQ(values(results), expected(kToken));
  mini_.uids.clear();
  fake_daemon().resolve_status = MOECACHED_E_TOO_MANY;
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{77, 0, 0, 0})) << "parts instead of slots";
  EXPECT_EQ(values(results), expected(kToken));
}

// Graphs that wait on the GPU are launched whole, once the first ones have been cut.
class WaitingSpillRunnerTest : public SpillRunnerTest {
 protected:
  void SetUp() override {
    FakeBackendCopy::hooked();
    SpillRunnerTest::SetUp();
    MiniGraph graph;
    build(graph, *served_, kToken);
    for (int i = 0; i < 5; ++i) ASSERT_EQ(run(graph, 1), GGML_STATUS_SUCCESS);
    fake_daemon().calls.clear();
    mini_.computed.clear();
    mini_.uids.clear();
  }
  static bool waited() { return std::ranges::count(fake_daemon().calls, "waits_begin") > 0; }
};

TEST_F(WaitingSpillRunnerTest, LaunchesATokenWholeAndTellsTheLayersInOrder) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().calls, (Calls{"waits_begin", "compute", "resolve", "resolve", "synchronize",
                                        "waits_end", "synchronize", "end"}));
  EXPECT_EQ(mini_.computed.size(), graph.nodes().size() + kLayers) << "one copy of ids a layer";
}

TEST_F(WaitingSpillRunnerTest, ComputesTheSameBytesAsStock) {
  uint64_t uid = 2;
  for (const auto& routing : {kToken, Routing{{0, 1}, {2, 3}, {6, 5}}, kPrompt, kToken}) {
    MiniGraph graph;
    const auto results = build(graph, *served_, routing);
    fake_daemon().calls.clear();
    for (int again = 0; again < 2; ++again) {
      ASSERT_EQ(run(graph, uid), GGML_STATUS_SUCCESS);
      EXPECT_EQ(values(results), expected(routing));
    }
    EXPECT_EQ(waited(), routing.size() <= 8);
    ++uid;
  }
}

TEST_F(WaitingSpillRunnerTest, CatchesAFlippedByte) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  fake_daemon().flip_a_byte = true;
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_TRUE(waited());
  EXPECT_NE(values(results), expected(kToken));
}

TEST_F(WaitingSpillRunnerTest, StockIsToldTheNumberOfAGraphAgainOnceItIsTheSame) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  const auto uids_of_run = [&] {
    mini_.uids.clear();
    EXPECT_EQ(run(graph), GGML_STATUS_SUCCESS);
    EXPECT_EQ(values(results), expected(kToken));
    return mini_.uids;
  };
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{77}));
  fake_daemon().move_spill_windows();
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{0})) << "what stock captured has the old addresses";
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{77}));
  fake_daemon().waits_begin_status = MOECACHED_E_UNAVAILABLE;  // the daemon is gone
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{0, 0, 0}))
      << "the first piece begins where the whole began";
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{77, 77, 77}));
  fake_daemon().waits_begin_status = MOECACHED_OK;
  EXPECT_EQ(uids_of_run(), (std::vector<uint64_t>{0}));
}

TEST_F(WaitingSpillRunnerTest, LeavesTheHostsNodesAsTheyWereAndSaysWhatFailed) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  std::vector<ggml_tensor> before;
  for (const ggml_tensor* node : graph.nodes()) before.push_back(*node);
  const auto same = [&] {
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_EQ(std::memcmp(graph.nodes()[i], &before[i], sizeof before[i]), 0) << "node " << i;
  };
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  same();
  fake_daemon().waits_end_status = MOECACHED_E_IO;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  same();
  fake_daemon().waits_end_status = MOECACHED_OK;
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(WaitingSpillRunnerTest, GraphsAreCutForGoodWhenAWaitCannotBeEnqueued) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  fake_daemon().wait_status = MOECACHED_E_SYSTEM;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED) << "ids are no slots";
  EXPECT_EQ(std::ranges::count(fake_daemon().calls, "resolve"), 0) << "a layer behind it would never be answered";
  fake_daemon().calls.clear();
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_FALSE(waited());
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(SpillRunnerTest, GraphsAreCutWhereWaitsAreNotPossible) {
  FakeBackendCopy::hooked();
  MiniGraph graph;
  build(graph, *served_, kToken);
  fake_daemon().waits_status = MOECACHED_E_UNAVAILABLE;
  for (int i = 0; i < 7; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(std::ranges::count(fake_daemon().calls, "waits_begin"), 0);
}

TEST_F(SpillRunnerTest, GraphsAreCutWhereWaitsAreNotWanted) {
  FakeBackendCopy::hooked();
  MiniGraph graph;
  build(graph, *served_, kToken);
  setenv("MOECACHED_GPU_WAIT", "0", 1);
  for (int i = 0; i < 7; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  unsetenv("MOECACHED_GPU_WAIT");
  EXPECT_EQ(std::ranges::count(fake_daemon().calls, "waits_begin"), 0);
}

TEST_F(SpillRunnerTest, GraphsAreCutWhereStockCopiesIdsInAnotherWay) {
  FakeBackendCopy::hooked();
  mini_.copies_past_the_hook = true;
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  for (int i = 0; i < 7; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(std::ranges::count(fake_daemon().calls, "waits_begin"), 0);
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(SpillRunnerTest, RefusesAGpuWithoutEventsOrMemory) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  mini_gpu_faults().no_events = true;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  mini_gpu_faults() = {};
  mini_gpu_faults().no_memory = true;
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_TRUE(mini_.computed.empty());
}

}  // namespace
}  // namespace moecached::testing
