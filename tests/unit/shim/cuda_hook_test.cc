// The devices of a miniature host, hooked once for the whole program, as in a real one.
#include "shim/ggml/cuda_hook.h"

#include <gtest/gtest.h>

#include "shim/ggml/gpu_device.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/session.h"
#include "shim/ggml/weight_buffer.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_gpu.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::served_tensor;
using shim::Session;

class CudaHookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("MOECACHED_LIBCUDA", FAKE_LIBCUDA, 1);
    reset_fake_daemon();
    mini_gpu_faults() = {};
    install_mini_host();
    Session::instance().open();
    EXPECT_TRUE(shim::has_cuda_device());
    setenv("MOECACHED_EXTRA_BUFTS", "1", 1);
    EXPECT_EQ(shim::hook_cuda_devices(), "");
    EXPECT_EQ(shim::hook_cuda_devices(), "") << "a second load must not hook the hook";
    unsetenv("MOECACHED_EXTRA_BUFTS");
    Session::instance().use_gpu(mini_gpu(0));
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), 1, 4);
    file_->serve(4, 1 << 20);
  }
  void TearDown() override { Session::instance().use_gpu(nullptr); }
  static bool supports(ggml_op op, int source, ggml_tensor* tensor) {
    ggml_tensor node = {};
    node.op = op;
    node.src[source] = tensor;
    return mini_gpu(0)->iface.supports_op(mini_gpu(0), &node);
  }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  const std::string gate_ = ExpertFile::name(0, "gate_exps.weight");
};

TEST_F(CudaHookTest, SupportsServedTensorsInExpertOperationsOnly) {
  LoadedModel model(*file_, 1, true);
  ggml_tensor* gate = model.tensor(gate_);
  EXPECT_TRUE(supports(GGML_OP_MUL_MAT_ID, 0, gate));
  EXPECT_TRUE(supports(GGML_OP_ADD_ID, 1, gate));
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT_ID, 1, gate));
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT, 0, gate)) << "stock would read the reservation";
  EXPECT_TRUE(mini_gpu(0)->iface.supports_op(mini_gpu(0), gate))
      << "a leaf must have a backend that can hold it";
  ggml_tensor view = *gate;
  view.view_src = gate;
  view.buffer = nullptr;
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT_ID, 0, &view));
  ggml_tensor ordinary = {};
  EXPECT_TRUE(supports(GGML_OP_MUL_MAT, 0, &ordinary));
  EXPECT_FALSE(supports(GGML_OP_IM2COL, 0, &ordinary)) << "what stock does not support";
}

TEST_F(CudaHookTest, LeavesToTheCpuWhatIsNotServedOnTheGpu) {
  fake_daemon().layers[0].parts.pop_back();
  {
    LoadedModel model(*file_, 1, true);
    EXPECT_TRUE(supports(GGML_OP_MUL_MAT_ID, 0, model.tensor(gate_)));
    EXPECT_FALSE(supports(GGML_OP_ADD_ID, 1, model.tensor(ExpertFile::name(0, "down_exps.bias"))));
  }
  fake_daemon().gpu_status = MOECACHED_E_REFUSED;
  const ExpertFile other(folder_.file("other.gguf"), 1, 4);
  other.serve(4, 1 << 20);
  LoadedModel model(other, 1, true);
  ASSERT_NE(served_tensor(model.tensor(gate_)), nullptr);
  EXPECT_NE(served_tensor(model.tensor(gate_))->model, nullptr) << "slots in RAM are better than none";
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT_ID, 0, model.tensor(gate_)));
}

// What llama.cpp puts between the router's logits and the ids of an expert operation.
struct Router {
  ggml_backend_buffer buffer = {};
  ggml_tensor weights = {}, logits = {}, biased = {}, probabilities = {}, sorted = {}, ids = {};
  explicit Router(ggml_backend_buffer_type_t type) {
    buffer.buft = type;
    weights.buffer = &buffer;
    logits.op = GGML_OP_MUL_MAT;
    logits.src[0] = &weights;
    biased.op = GGML_OP_ADD;
    biased.src[0] = &logits;
    probabilities.op = GGML_OP_SOFT_MAX;
    probabilities.src[0] = &biased;
    sorted.op = GGML_OP_ARGSORT;
    sorted.src[0] = &probabilities;
    ids.op = GGML_OP_VIEW;
    ids.view_src = ids.src[0] = &sorted;
  }
};

TEST_F(CudaHookTest, AnExpertOperationIsOfTheGpuThatHasItsRouter) {
  LoadedModel model(*file_, 1, true);
  ggml_tensor node = {};
  node.op = GGML_OP_MUL_MAT_ID;
  node.src[0] = model.tensor(gate_);
  const auto supporters = [&](ggml_backend_buffer_type_t routers) {
    Router router(routers);
    node.src[2] = &router.ids;
    std::string names;
    for (std::size_t gpu = 0; gpu < 2; ++gpu) {
      if (mini_gpu(gpu)->iface.supports_op(mini_gpu(gpu), &node))
        names.append(mini_gpu(gpu)->iface.get_name(mini_gpu(gpu)));
    }
    return names;
  };
  EXPECT_EQ(supporters(mini_gpu(0)->iface.get_buffer_type(mini_gpu(0))), "CUDA0");
  EXPECT_EQ(supporters(mini_gpu(1)->iface.get_buffer_type(mini_gpu(1))), "CUDA1");
  EXPECT_EQ(supporters(shim::weight_buffer_type()), "CUDA0CUDA1")
      << "a router that is on no GPU decides nothing";
  node.src[2] = nullptr;
  EXPECT_TRUE(mini_gpu(1)->iface.supports_op(mini_gpu(1), &node)) << "the loader asks without ids";
}

TEST_F(CudaHookTest, ModelsAreOpenedOnTheGpuThatGotMemoryLast) {
  ggml_backend_buffer_type_t second = mini_gpu(1)->iface.get_buffer_type(mini_gpu(1));
  ggml_backend_buffer_type_t first = mini_gpu(0)->iface.get_buffer_type(mini_gpu(0));
  ggml_backend_buffer_t weights = second->iface.alloc_buffer(second, 64);
  ggml_backend_buffer_t question = first->iface.alloc_buffer(first, 0);
  {
    LoadedModel model(*file_, 1, true);
    EXPECT_EQ(fake_daemon().opened_uuids, (std::vector<uint8_t>{0x41}));
  }
  shim::host().ggml_backend_buffer_free(question);
  shim::host().ggml_backend_buffer_free(weights);
}

TEST_F(CudaHookTest, SupportsAGraphThatIsOnlyMeasured) {
  ggml_backend_buffer_t empty = shim::weight_buffer_type()->iface.alloc_buffer(shim::weight_buffer_type(), 0);
  ggml_tensor weight = {};
  weight.buffer = empty;
  EXPECT_TRUE(supports(GGML_OP_MUL_MAT_ID, 0, &weight));
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT, 0, &weight));
  shim::host().ggml_backend_buffer_free(empty);
}

TEST_F(CudaHookTest, SupportsOurBufferTypeBesideStocks) {
  const auto supports_buft = [](ggml_backend_buffer_type_t type) {
    return mini_gpu(0)->iface.supports_buft(mini_gpu(0), type);
  };
  EXPECT_TRUE(supports_buft(shim::weight_buffer_type()));
  EXPECT_TRUE(supports_buft(mini_gpu(0)->iface.get_buffer_type(mini_gpu(0))));
  EXPECT_FALSE(supports_buft(mini_gpu(1)->iface.get_buffer_type(mini_gpu(1))));
}

TEST_F(CudaHookTest, OffersTheBufferTypeToTheLoaderInPlaceOfTheGpusOwn) {
  const auto extra = reinterpret_cast<ggml_backend_buffer_type_t* (*)(ggml_backend_dev_t)>(
      mini_gpu_registry()->iface.get_proc_address(mini_gpu_registry(), "ggml_backend_dev_get_extra_bufts"));
  ASSERT_NE(extra, nullptr);
  EXPECT_EQ(extra(mini_gpu(0))[0], shim::weight_buffer_type());
  EXPECT_EQ(extra(mini_gpu(0))[1], nullptr);
  ggml_backend_buffer_type_t own = mini_gpu(0)->iface.get_buffer_type(mini_gpu(0));
  ggml_backend_buffer_t empty = own->iface.alloc_buffer(own, 0);
  ggml_tensor weight = {};
  weight.buffer = empty;
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT_ID, 0, &weight));
  EXPECT_FALSE(supports(GGML_OP_ADD_ID, 1, &weight));
  EXPECT_TRUE(supports(GGML_OP_MUL_MAT, 0, &weight)) << "other weights stay on the GPU";
  shim::host().ggml_backend_buffer_free(empty);
}

TEST_F(CudaHookTest, ComputesExpertsThroughTheBackendsItMakes) {
  auto model = std::make_unique<LoadedModel>(*file_, 1, true);
  ggml_backend_t backend = mini_gpu(0)->iface.init_backend(mini_gpu(0), nullptr);
  const auto compute = [](LoadedModel& loaded, MiniGraph& graph) {
    return graph.mul_mat_id(loaded.tensor(ExpertFile::name(0, "gate_exps.weight")),
                            graph.activations({ExpertFile::kIn, 1, 1}, 1), graph.ids({{3, 1}}, 4));
  };
  MiniGraph graph;
  const ggml_tensor* gate = compute(*model, graph);
  ggml_cgraph cgraph = graph.graph();
  ASSERT_EQ(backend->iface.graph_compute(backend, &cgraph), GGML_STATUS_SUCCESS);
  LoadedModel stock(*file_, 1, false);
  MiniGraph stock_graph;
  const ggml_tensor* expected = compute(stock, stock_graph);
  MiniBackend stock_backend;
  ggml_cgraph stock_cgraph = stock_graph.graph();
  ASSERT_EQ(MiniBackend::compute(&stock_backend.backend, &stock_cgraph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(MiniGraph::values(*gate), MiniGraph::values(*expected));
  fake_daemon().calls.clear();
  backend->iface.free(backend);
  EXPECT_EQ(fake_daemon().calls, (std::vector<std::string>{"synchronize", "close", "free"}));
  model.reset();
  EXPECT_EQ(fake_daemon().open_models, 0u);
}

TEST(GpuDevice, TellsTheUuidOrWhyNot) {
  setenv("MOECACHED_LIBCUDA", FAKE_LIBCUDA, 1);
  shim::GpuUuid uuid = {};
  EXPECT_EQ(shim::uuid_of(mini_gpu(1), uuid), "");
  EXPECT_EQ(uuid[0], 0x41);
  EXPECT_EQ(uuid[15], 0x41);
  setenv("MOECACHED_LIBCUDA", "/no/such/library.so", 1);
  EXPECT_NE(shim::uuid_of(mini_gpu(1), uuid).find("no CUDA driver library"), std::string::npos);
  setenv("MOECACHED_LIBCUDA", FAKE_LIBCUDA, 1);
}

}  // namespace
}  // namespace moecached::testing
