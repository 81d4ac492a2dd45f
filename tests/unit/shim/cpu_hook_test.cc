// One device of a miniature host, hooked once for the whole program, as in a real one.
#include "shim/ggml/cpu_hook.h"

#include <gtest/gtest.h>

#include <fstream>

#include "shim/ggml/session.h"
#include "shim/ggml/weight_buffer.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

int g_freed = 0;
bool g_host_aborts = false;

MiniBackend& mini_of(ggml_backend_t backend) { return *static_cast<MiniBackend*>(backend->context); }

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  auto* mini = new MiniBackend;
  mini->backend.device = device;
  mini->backend.iface.graph_compute = MiniBackend::compute;
  mini->backend.iface.free = [](ggml_backend_t backend) {
    ++g_freed;
    delete &mini_of(backend);
  };
  return &mini->backend;
}

void set_abort(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  mini_of(backend).abort = callback;
  mini_of(backend).abort_data = data;
}

int g_other_function = 0;

ggml_backend_dev_t hooked_device() {
  static ggml_backend_reg registry = {};
  static ggml_backend_device device = {};
  if (device.reg == nullptr) {
    registry.iface.get_proc_address = [](ggml_backend_reg_t, const char* name) -> void* {
      return std::string(name) == "ggml_backend_set_abort_callback" ? reinterpret_cast<void*>(set_abort)
                                                                    : &g_other_function;
    };
    device.reg = &registry;
    device.iface.init_backend = init_backend;
    // Stock: everything but one operation; its own memory only.
    device.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor* op) {
      return op->op != GGML_OP_IM2COL;
    };
    device.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
      return type == nullptr;
    };
    shim::hook_cpu_device(&device);
    shim::hook_cpu_device(&device);  // a second load must not hook the hook
  }
  return &device;
}

class CpuHookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    reset_fake_daemon();
    install_mini_host();
    shim::Session::instance().open();
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), 1, 4);
    file_->serve(2, 1 << 20);
    fake_daemon().layers[0].parts.pop_back();  // the bias is left out
    model_ = std::make_unique<LoadedModel>(*file_, 1, true);
    device_ = hooked_device();
  }
  bool supports(ggml_op op, int source, ggml_tensor* tensor) const {
    ggml_tensor node = {};
    node.op = op;
    node.src[source] = tensor;
    return device_->iface.supports_op(device_, &node);
  }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  std::unique_ptr<LoadedModel> model_;
  ggml_backend_dev_t device_ = nullptr;
};

TEST_F(CpuHookTest, SupportsServedTensorsInExpertOperationsOnly) {
  ggml_tensor* gate = model_->tensor(ExpertFile::name(0, "gate_exps.weight"));
  EXPECT_TRUE(supports(GGML_OP_MUL_MAT_ID, 0, gate));
  EXPECT_TRUE(supports(GGML_OP_ADD_ID, 1, gate));
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT_ID, 1, gate));
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT, 0, gate)) << "stock would read the reservation";
  EXPECT_FALSE(supports(GGML_OP_GET_ROWS, 0, gate));
  EXPECT_TRUE(device_->iface.supports_op(device_, gate)) << "a leaf must have a backend that can hold it";
  ggml_tensor view = *gate;
  view.view_src = gate;
  view.buffer = nullptr;
  EXPECT_FALSE(supports(GGML_OP_CPY, 0, &view));
}

TEST_F(CpuHookTest, SupportsLeftOutTensorsLikeStock) {
  ggml_tensor* bias = model_->tensor(ExpertFile::name(0, "down_exps.bias"));
  EXPECT_TRUE(supports(GGML_OP_ADD_ID, 1, bias));
  EXPECT_TRUE(supports(GGML_OP_ADD, 1, bias));
  EXPECT_FALSE(supports(GGML_OP_IM2COL, 0, bias));
}

TEST_F(CpuHookTest, SupportsOurBufferTypeBesideStocks) {
  EXPECT_TRUE(device_->iface.supports_buft(device_, shim::weight_buffer_type()));
  EXPECT_TRUE(device_->iface.supports_buft(device_, nullptr));
  ggml_backend_buffer_type other = {};
  EXPECT_FALSE(device_->iface.supports_buft(device_, &other));
}

TEST_F(CpuHookTest, ComputesExpertsThroughTheBackendsItMakes) {
  ggml_backend_t backend = device_->iface.init_backend(device_, nullptr);
  MiniGraph graph;
  ggml_tensor* ids = graph.ids({{3, 1}}, 4);
  ggml_tensor* input = graph.activations({ExpertFile::kIn, 1, 1}, 1);
  ggml_tensor* gate = graph.mul_mat_id(model_->tensor(ExpertFile::name(0, "gate_exps.weight")), input, ids);
  ggml_cgraph cgraph = graph.graph();
  ASSERT_EQ(backend->iface.graph_compute(backend, &cgraph), GGML_STATUS_SUCCESS);

  LoadedModel stock(*file_, 1, false);
  MiniGraph stock_graph;
  ggml_tensor* expected = stock_graph.mul_mat_id(stock.tensor(ExpertFile::name(0, "gate_exps.weight")),
                                                 stock_graph.activations({ExpertFile::kIn, 1, 1}, 1),
                                                 stock_graph.ids({{3, 1}}, 4));
  MiniBackend stock_backend;
  ggml_cgraph stock_cgraph = stock_graph.graph();
  ASSERT_EQ(MiniBackend::compute(&stock_backend.backend, &stock_cgraph), GGML_STATUS_SUCCESS);
  EXPECT_EQ(MiniGraph::values(*gate), MiniGraph::values(*expected));
  backend->iface.free(backend);
}

TEST_F(CpuHookTest, KeepsTheHostsAbortCallbackWorking) {
  ggml_backend_t backend = device_->iface.init_backend(device_, nullptr);
  auto set = reinterpret_cast<ggml_backend_set_abort_callback_t>(
      device_->reg->iface.get_proc_address(device_->reg, "ggml_backend_set_abort_callback"));
  g_host_aborts = true;
  set(
      backend, [](void*) { return g_host_aborts; }, nullptr);
  MiniGraph graph;
  graph.scale(graph.activations({4, 1, 1}, 1));
  graph.scale(graph.activations({4, 1, 1}, 1));
  ggml_cgraph cgraph = graph.graph();
  EXPECT_EQ(backend->iface.graph_compute(backend, &cgraph), GGML_STATUS_ABORTED);
  g_host_aborts = false;
  EXPECT_EQ(backend->iface.graph_compute(backend, &cgraph), GGML_STATUS_SUCCESS);
  backend->iface.free(backend);
  EXPECT_EQ(device_->reg->iface.get_proc_address(device_->reg, "other"), &g_other_function);
}

// A figure of a line of JSON.
uint64_t figure(const std::string& line, const std::string& name) {
  const std::size_t at = line.find("\"" + name + "\":");
  return at == std::string::npos ? UINT64_MAX
                                 : std::strtoull(line.c_str() + at + name.size() + 3, nullptr, 10);
}

TEST_F(CpuHookTest, WritesALineOfSumsWhenTheLastBackendGoes) {
  const std::string path = folder_.file("stats");
  setenv("MOECACHED_STATS_FILE", path.c_str(), 1);
  for (int round = 0; round < 2; ++round) {
    ggml_backend_t first = device_->iface.init_backend(device_, nullptr);
    ggml_backend_t second = device_->iface.init_backend(device_, nullptr);
    MiniGraph graph;
    graph.mul_mat_id(model_->tensor(ExpertFile::name(0, "gate_exps.weight")),
                     graph.activations({ExpertFile::kIn, 1, 1}, 1), graph.ids({{round, 3}}, 4));
    ggml_cgraph cgraph = graph.graph();
    ASSERT_EQ(first->iface.graph_compute(first, &cgraph), GGML_STATUS_SUCCESS);
    const int freed_before = g_freed;
    first->iface.free(first);
    if (round == 0) {
      EXPECT_FALSE(std::ifstream(path).good()) << "one backend is left";
    }
    second->iface.free(second);
    EXPECT_EQ(g_freed, freed_before + 2);
  }
  shim::Session::instance().write_stats();  // nothing new: no third line
  unsetenv("MOECACHED_STATS_FILE");
  std::ifstream file(path);
  std::string lines[3];
  ASSERT_TRUE(std::getline(file, lines[0]) && std::getline(file, lines[1]));
  EXPECT_FALSE(std::getline(file, lines[2]));
  EXPECT_EQ(figure(lines[1], "graphs") - figure(lines[0], "graphs"), 1u);
  EXPECT_EQ(figure(lines[1], "lookups") - figure(lines[0], "lookups"), 2u);
  EXPECT_EQ(figure(lines[1], "leases") - figure(lines[0], "leases"), 1u)
      << "expert 3 was resident in the second round";
}

}  // namespace
}  // namespace moecached::testing
