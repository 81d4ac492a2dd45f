// The hooked graph compute on a mini GPU: the bytes of stock, the order of calls, and what the client is
// told.
#include "shim/ggml/cuda_backend_hook.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

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

constexpr uint32_t kLayers = 2;
constexpr uint32_t kExperts = 7;

class CudaBackendHookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("MOECACHED_LIBCUDA", FAKE_LIBCUDA, 1);
    reset_fake_daemon();
    mini_gpu_faults() = {};
    install_mini_host();
    Session::instance().open();
    Session::instance().use_gpu(mini_gpu(0));
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), kLayers, kExperts);
    file_->serve(kExperts, 1 << 20);
    stock_ = std::make_unique<LoadedModel>(*file_, kLayers, false);
    served_ = std::make_unique<LoadedModel>(*file_, kLayers, true);
    make_gpu_backend(mini_, mini_gpu(0));
    hook_ = std::make_unique<CudaBackendHook>(&mini_.backend, mini_.backend.iface);
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
      const auto weight = [&](const char* part) { return model.tensor(ExpertFile::name(layer, part)); };
      ggml_tensor* gate = graph.mul_mat_id(weight("gate_exps.weight"), input, ids);
      ggml_tensor* doubled = graph.scale(gate);
      ggml_tensor* up = graph.mul_mat_id(weight("up_exps.weight"), input, ids);
      ggml_tensor* down = graph.mul_mat_id(weight("down_exps.weight"), doubled, ids);
      ggml_tensor* biased = graph.add_id(down, weight("down_exps.bias"), ids);
      for (ggml_tensor* result : {gate, doubled, up, down, biased}) results.push_back(result);
    }
    return results;
  }
  static std::vector<std::vector<float>> values(const std::vector<ggml_tensor*>& tensors) {
    std::vector<std::vector<float>> all;
    for (const ggml_tensor* tensor : tensors) all.push_back(MiniGraph::values(*tensor));
    return all;
  }
  std::vector<std::vector<float>> expected(const std::vector<std::vector<int32_t>>& routing) {
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
  static uint64_t plans() { return Session::instance().counters().gpu_plans; }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  std::unique_ptr<LoadedModel> stock_;
  std::unique_ptr<LoadedModel> served_;
  MiniBackend mini_;
  std::unique_ptr<CudaBackendHook> hook_;
};

const std::vector<std::vector<int32_t>> kToken = {{4, 1}};
const std::vector<std::vector<int32_t>> kPrompt = {{0, 1}, {2, 3}, {4, 5}, {6, 0}, {3, 1},
                                                   {5, 2}, {6, 4}, {1, 2}, {0, 6}};

TEST_F(CudaBackendHookTest, OpensTheModelOnTheGpuWhenItIsLoaded) {
  EXPECT_EQ(fake_daemon().open_models, 1u) << "the daemon can read it while the host goes on loading";
  EXPECT_EQ(fake_daemon().opened_uuids, std::vector<uint8_t>{0x40});
}

TEST_F(CudaBackendHookTest, ComputesTheSameBytesAsStock) {
  uint64_t uid = 1;
  for (const auto& routing : {kToken, kPrompt, kToken}) {
    MiniGraph graph;
    const auto results = build(graph, *served_, routing);
    ASSERT_EQ(run(graph, uid++), GGML_STATUS_SUCCESS);
    EXPECT_EQ(values(results), expected(routing));
  }
}

TEST_F(CudaBackendHookTest, CatchesAFlippedByteInASlot) {
  fake_daemon().flip_a_byte = true;
  fake_daemon().move_gpu_windows();
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_NE(values(results), expected(kToken)) << "a test that compares bytes would not see a wrong slot";
}

TEST_F(CudaBackendHookTest, BeginsWaitsComputesRecordsAndSubmitsInThisOrder) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().calls, (Calls{"begin", "event_wait", "compute", "event_record", "submit"}));
  EXPECT_TRUE(fake_daemon().submits[0].has_events);
  EXPECT_EQ(mini_.computed.size(), graph.nodes().size() + kLayers);
}

TEST_F(CudaBackendHookTest, TellsTheSlotsThatAGraphUsed) {
  MiniGraph token;
  build(token, *served_, kToken);
  ASSERT_EQ(run(token), GGML_STATUS_SUCCESS);
  const FakeSubmit& decode = fake_daemon().submits.at(0);
  EXPECT_EQ(decode.layers, (std::vector<uint16_t>{0, 1}));
  EXPECT_EQ(decode.n_tokens, 1u);
  EXPECT_FALSE(decode.is_prefill);
  // Ten slots, expert e in slot 9 - e; layer 1 uses experts 5 and 2.
  EXPECT_EQ(decode.slots, (std::vector<std::vector<int32_t>>{{5, 8}, {4, 7}}));
  MiniGraph prompt;
  build(prompt, *served_, kPrompt);
  ASSERT_EQ(run(prompt, 78), GGML_STATUS_SUCCESS);
  EXPECT_TRUE(fake_daemon().submits.at(1).is_prefill);
  EXPECT_EQ(fake_daemon().submits.at(1).n_tokens, kPrompt.size());
}

TEST_F(CudaBackendHookTest, TellsNothingOfAWarmUp) {
  MiniGraph graph;
  build(graph, *served_, {{0, 1, 2, 3, 4, 5, 6}});
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_TRUE(fake_daemon().submits.at(0).layers.empty());
}

TEST_F(CudaBackendHookTest, LeavesTheHostsNodesAsTheyWere) {
  MiniGraph graph;
  build(graph, *served_, kPrompt);
  std::vector<ggml_tensor> before;
  for (const ggml_tensor* node : graph.nodes()) before.push_back(*node);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  mini_gpu_faults().compute = GGML_STATUS_FAILED;
  ASSERT_EQ(run(graph), GGML_STATUS_FAILED);
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(std::memcmp(graph.nodes()[i], &before[i], sizeof before[i]), 0) << "node " << i;
  }
}

TEST_F(CudaBackendHookTest, EndsTheEpochOfAGraphThatFailed) {
  mini_gpu_faults().compute = GGML_STATUS_FAILED;
  MiniGraph graph;
  build(graph, *served_, kToken);
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_EQ(fake_daemon().calls, (Calls{"begin", "event_wait", "compute", "event_record", "submit"}));
  EXPECT_TRUE(fake_daemon().submits.at(0).layers.empty()) << "the slots were not computed";
}

TEST_F(CudaBackendHookTest, LaunchesNothingWhenNoEpochBegan) {
  fake_daemon().begin_status = MOECACHED_E_IO;
  MiniGraph graph;
  build(graph, *served_, kToken);
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_EQ(fake_daemon().calls, Calls{"begin"});
}

TEST_F(CudaBackendHookTest, EndsTheEpochWhenThereIsNoMemoryForSlots) {
  mini_gpu_faults().no_memory = true;
  MiniGraph graph;
  build(graph, *served_, kToken);
  EXPECT_EQ(run(graph), GGML_STATUS_ALLOC_FAILED);
  EXPECT_EQ(fake_daemon().calls, (Calls{"begin", "event_record", "submit"}));
}

TEST_F(CudaBackendHookTest, RefusesAGpuWithoutEvents) {
  mini_gpu_faults().no_events = true;
  MiniGraph graph;
  build(graph, *served_, kToken);
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED);
  EXPECT_EQ(run(graph), GGML_STATUS_FAILED)
      << "the plan that failed must not pass for a graph without experts";
  EXPECT_TRUE(mini_.computed.empty());
}

TEST_F(CudaBackendHookTest, PlansAGraphOnceForEachNumber) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  const uint64_t before = plans();
  for (int i = 0; i < 3; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(plans() - before, 1u);
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{0, 77, 77}));
  for (int i = 0; i < 2; ++i) ASSERT_EQ(run(graph, 0), GGML_STATUS_SUCCESS);
  EXPECT_EQ(plans() - before, 3u) << "graphs without a number are planned each time";
}

TEST_F(CudaBackendHookTest, PlansAgainWhenANumberStandsForAnotherGraph) {
  MiniGraph first;
  build(first, *served_, kToken);
  ASSERT_EQ(run(first), GGML_STATUS_SUCCESS);
  MiniGraph second;
  const auto results = build(second, *served_, kPrompt);
  ASSERT_EQ(run(second), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kPrompt));
  EXPECT_EQ(mini_.uids.back(), 0u);
}

TEST_F(CudaBackendHookTest, KeepsABoundedNumberOfPlans) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  for (uint64_t uid = 1; uid < 100; ++uid) ASSERT_EQ(run(graph, uid), GGML_STATUS_SUCCESS);
  const uint64_t before = plans();
  ASSERT_EQ(run(graph, 99), GGML_STATUS_SUCCESS);
  EXPECT_EQ(plans(), before);
  ASSERT_EQ(run(graph, 1), GGML_STATUS_SUCCESS);
  EXPECT_EQ(plans(), before + 1);
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(CudaBackendHookTest, GrowsTheSlotsAndPlacesOldPlansAnew) {
  MiniGraph token;
  const auto results = build(token, *served_, kToken);
  ASSERT_EQ(run(token, 1), GGML_STATUS_SUCCESS);
  MiniGraph prompt;
  std::vector<std::vector<int32_t>> rows;
  for (int32_t i = 0; i < 128; ++i) rows.push_back({i % 7, (i + 3) % 7});
  const auto prompt_results = build(prompt, *served_, rows);
  fake_daemon().calls.clear();
  ASSERT_EQ(run(prompt, 2), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(prompt_results), expected(rows));
  EXPECT_EQ(fake_daemon().calls, (Calls{"begin", "synchronize", "event_synchronize", "event_wait", "compute",
                                        "event_record", "submit"}))
      << "nobody may use the old slots when they are freed";
  ASSERT_EQ(run(token, 1), GGML_STATUS_SUCCESS);
  EXPECT_EQ(mini_.uids.back(), 0u) << "what stock captured has the old address";
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(mini_gpu_buffers(), 1u);
}

TEST_F(CudaBackendHookTest, FollowsWindowsThatMoved) {
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  fake_daemon().gpu_gap = 5;
  fake_daemon().move_gpu_windows();
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  fake_daemon().move_in_begin = true;
  fake_daemon().all_resident = true;
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_TRUE(fake_daemon().submits.back().layers.empty()) << "nothing is looked up where experts are slots";
  EXPECT_FALSE(fake_daemon().submits.back().whole_layers.empty()) << "but that they were used is told";
  EXPECT_EQ(fake_daemon().submits.back().n_tokens, kToken.size());
  EXPECT_EQ(mini_.uids, (std::vector<uint64_t>{0, 0, 0}));
}

TEST_F(CudaBackendHookTest, ReconnectsBetweenGraphs) {
  fake_daemon().connected = false;
  MiniGraph graph;
  build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().reconnects, 1u);
}

TEST_F(CudaBackendHookTest, HandsGraphsWithoutExpertsToStock) {
  MiniGraph graph;
  graph.scale(graph.activations({4, 1, 1}, 1));
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(fake_daemon().calls, Calls{"compute"});
  EXPECT_EQ(mini_.uids.back(), 77u);
}

TEST_F(CudaBackendHookTest, HasALaneForEachModel) {
  const ExpertFile draft_file(folder_.file("draft.gguf"), kLayers, kExperts);  // the same tensor names
  auto draft = std::make_unique<LoadedModel>(draft_file, kLayers, true);
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  build(graph, *draft, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(fake_daemon().open_lanes, 2u);
  EXPECT_EQ(fake_daemon().calls, (Calls{"begin", "begin", "event_wait", "event_wait", "compute",
                                        "event_record", "submit", "event_record", "submit"}));
  hook_.reset();
}

TEST_F(CudaBackendHookTest, OpensTheModelOnAnotherGpuWhenThatComputes) {
  MiniBackend other;
  make_gpu_backend(other, mini_gpu(1));
  CudaBackendHook hook(&other.backend, other.backend.iface);
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ggml_cgraph cgraph = graph.graph();
  ASSERT_EQ(hook.compute(&cgraph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(fake_daemon().opened_uuids, (std::vector<uint8_t>{0x40, 0x41}));
}

TEST_F(CudaBackendHookTest, ComputesATensorThatWasLoadedLater) {
  MiniGraph first;
  build(first, *served_, kToken);
  ASSERT_EQ(run(first, 1), GGML_STATUS_SUCCESS);
  auto again = std::make_unique<LoadedModel>(*file_, kLayers, true);  // a second load of the file
  MiniGraph second;
  const auto results = build(second, *again, kToken);
  ASSERT_EQ(run(second, 2), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(fake_daemon().open_models, 1u);
}

class CudaFetchInGraphsTest : public CudaBackendHookTest {
 protected:
  // Runs tokens until the lane has its scratch slots and uses them.
  void use_scratch(uint32_t slots = 8) {
    FakeBackendCopy::hooked();
    fake_daemon().scratch_slots = slots;
    MiniGraph graph;
    build(graph, *served_, kToken);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
    fake_daemon().fetches.clear();
    fake_daemon().submits.clear();
  }
};

TEST_F(CudaFetchInGraphsTest, AsksForScratchSlotsBehindTheFirstTokens) {
  FakeBackendCopy::hooked();
  fake_daemon().scratch_slots = 8;
  MiniGraph graph;
  build(graph, *served_, kToken);
  for (int i = 0; i < 16; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(std::count(fake_daemon().calls.begin(), fake_daemon().calls.end(), "scratch"), 0)
      << "the host's own memory comes first";
  for (int i = 0; i < 16; ++i) ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(std::count(fake_daemon().calls.begin(), fake_daemon().calls.end(), "scratch"), 1);
  EXPECT_EQ(fake_daemon().fetches.size(), 15 * kLayers);
}

TEST_F(CudaFetchInGraphsTest, ComputesTheSameBytesFromWhatWasFetched) {
  use_scratch();
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph, 80), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(fake_daemon().fetches.size(), kLayers);
  EXPECT_EQ(fake_daemon().submits.at(0).slots, (std::vector<std::vector<int32_t>>{{5, 8}, {4, 7}}))
      << "the log names slots of the table, not scratch slots";
  fake_daemon().spoil_fetch = true;
  ASSERT_EQ(run(graph, 80), GGML_STATUS_SUCCESS);
  EXPECT_NE(values(results), expected(kToken)) << "what was fetched is not what was computed with";
}

TEST_F(CudaFetchInGraphsTest, FetchesForAFewTokensAndNotForPrompts) {
  use_scratch();
  MiniGraph few;
  const std::vector<std::vector<int32_t>> tokens = {{4, 1}, {1, 3}, {0, 6}, {4, 6}};
  const auto few_results = build(few, *served_, tokens);
  ASSERT_EQ(run(few, 81), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(few_results), expected(tokens));
  EXPECT_EQ(fake_daemon().fetches.size(), kLayers);
  MiniGraph more;
  const std::vector<std::vector<int32_t>> five = {{4, 1}, {1, 3}, {0, 6}, {4, 6}, {2, 3}};
  const auto more_results = build(more, *served_, five);
  ASSERT_EQ(run(more, 82), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(more_results), expected(five));
  MiniGraph prompt;
  const auto prompt_results = build(prompt, *served_, kPrompt);
  ASSERT_EQ(run(prompt, 83), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(prompt_results), expected(kPrompt));
  EXPECT_EQ(fake_daemon().fetches.size(), kLayers) << "10 ids do not fit into 8 scratch slots";
}

TEST_F(CudaFetchInGraphsTest, AsksAgainWhenTheWindowsMoved) {
  use_scratch();
  fake_daemon().gpu_gap = 6;
  fake_daemon().move_gpu_windows();
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_TRUE(fake_daemon().fetches.empty()) << "into the old ones";
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
  EXPECT_EQ(fake_daemon().fetches.size(), kLayers);
  EXPECT_EQ(mini_.uids.back(), 0u) << "stock must capture anew";
}

TEST_F(CudaFetchInGraphsTest, GoesOnInPlaceWhenTheKernelCannotBeLaunched) {
  use_scratch();
  fake_daemon().fetch_status = MOECACHED_E_SYSTEM;
  MiniGraph graph;
  const auto results = build(graph, *served_, kToken);
  ASSERT_EQ(run(graph, 84), GGML_STATUS_SUCCESS);
  EXPECT_EQ(values(results), expected(kToken));
}

TEST_F(CudaBackendHookTest, ClosesItsLanesWhenTheStreamIsIdle) {
  MiniGraph graph;
  build(graph, *served_, kToken);
  ASSERT_EQ(run(graph), GGML_STATUS_SUCCESS);
  fake_daemon().calls.clear();
  hook_.reset();
  EXPECT_EQ(fake_daemon().calls, (Calls{"synchronize", "close"}));
}

}  // namespace
}  // namespace moecached::testing
