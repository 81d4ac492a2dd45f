#include "shim/ggml/cpu_hook.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "shim/ggml/backend_hook.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {
namespace {

constexpr const char* kSetAbort = "ggml_backend_set_abort_callback";

struct HookedBackend {
  ggml_backend_i stock;
  std::unique_ptr<BackendHook> hook;
};

struct CpuHook {
  ggml_backend_dev_t device = nullptr;
  ggml_backend_device_i stock = {};
  ggml_backend_reg_i stock_registry = {};
  std::shared_mutex mutex;
  std::unordered_map<ggml_backend_t, HookedBackend> backends;
};

CpuHook& state() {
  static CpuHook* instance = new CpuHook;  // never destroyed: backends may be freed during the host's exit
  return *instance;
}

BackendHook* hook_of(ggml_backend_t backend) {
  CpuHook& cpu = state();
  const std::shared_lock lock(cpu.mutex);
  const auto found = cpu.backends.find(backend);
  return found == cpu.backends.end() ? nullptr : found->second.hook.get();
}

ggml_status hooked_graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  return hook_of(backend)->compute(graph);
}

void hooked_free(ggml_backend_t backend) {
  CpuHook& cpu = state();
  HookedBackend freed;
  bool last = false;
  {
    const std::unique_lock lock(cpu.mutex);
    const auto found = cpu.backends.find(backend);
    freed = std::move(found->second);
    cpu.backends.erase(found);
    last = cpu.backends.empty();
  }
  // Before the lanes are closed: the last of them may close the model and its counters with it.
  if (last) Session::instance().write_stats();
  freed.hook.reset();
  freed.stock.free(backend);
}

ggml_backend_set_abort_callback_t stock_set_abort() {
  const CpuHook& cpu = state();
  if (cpu.stock_registry.get_proc_address == nullptr) return nullptr;
  return reinterpret_cast<ggml_backend_set_abort_callback_t>(
      cpu.stock_registry.get_proc_address(cpu.device->reg, kSetAbort));
}

void hooked_set_abort(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  if (BackendHook* hook = hook_of(backend)) {
    hook->set_host_abort(callback, data);
  } else {
    stock_set_abort()(backend, callback, data);
  }
}

void* hooked_get_proc_address(ggml_backend_reg_t registry, const char* name) {
  if (std::strcmp(name, kSetAbort) == 0) return reinterpret_cast<void*>(hooked_set_abort);
  return state().stock_registry.get_proc_address(registry, name);
}

ggml_backend_t hooked_init_backend(ggml_backend_dev_t device, const char* params) {
  CpuHook& cpu = state();
  ggml_backend_t backend = cpu.stock.init_backend(device, params);
  if (backend == nullptr) return nullptr;
  auto hook = std::make_unique<BackendHook>(backend, backend->iface.graph_compute);
  stock_set_abort()(backend, BackendHook::abort_callback, hook.get());
  const std::unique_lock lock(cpu.mutex);
  cpu.backends[backend] = {backend->iface, std::move(hook)};
  backend->iface.graph_compute = hooked_graph_compute;
  backend->iface.free = hooked_free;
  // A plan keeps a graph for later, past our swap and restore. No host uses plans; ggml asserts on a backend
  // without them, which is better than a kernel that reads the reservation.
  backend->iface.graph_plan_create = nullptr;
  backend->iface.graph_plan_free = nullptr;
  backend->iface.graph_plan_update = nullptr;
  backend->iface.graph_plan_compute = nullptr;
  return backend;
}

// Tensors of ours can be a source of the operations that the hook rewrites and of nothing else, else stock
// code would read a reservation. The tensors that were left out are ordinary memory.
bool hooked_supports_op(ggml_backend_dev_t device, const ggml_tensor* op) {
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* source = op->src[i];
    if (source == nullptr || !is_in_weight_buffer(source)) continue;
    const ServedTensor* served = source->data == nullptr ? nullptr : served_tensor(source);
    if (served != nullptr && served->gpu != nullptr) return false;
    const bool is_expert_op =
        (op->op == GGML_OP_MUL_MAT_ID && i == 0) || (op->op == GGML_OP_ADD_ID && i == 1);
    const bool left_out = source->data != nullptr && source->view_src == nullptr && served == nullptr;
    if (!is_expert_op && !left_out) return false;
  }
  return state().stock.supports_op(device, op);
}

bool hooked_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
  return type == weight_buffer_type() || state().stock.supports_buft(device, type);
}

}  // namespace

void hook_cpu_device(ggml_backend_dev_t cpu_device) {
  CpuHook& cpu = state();
  if (cpu.device != nullptr) return;
  cpu.device = cpu_device;
  cpu.stock = cpu_device->iface;
  cpu.stock_registry = cpu_device->reg->iface;
  cpu_device->iface.init_backend = hooked_init_backend;
  cpu_device->iface.supports_op = hooked_supports_op;
  cpu_device->iface.supports_buft = hooked_supports_buft;
  cpu_device->reg->iface.get_proc_address = hooked_get_proc_address;
}

}  // namespace moecached::shim
