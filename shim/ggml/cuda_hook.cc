#include "shim/ggml/cuda_hook.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shim/ggml/cuda_backend_hook.h"
#include "shim/ggml/cuda_fetch.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/layer_device.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {
namespace {

constexpr const char* kExtraBufts = "ggml_backend_dev_get_extra_bufts";

struct HookedDevice {
  ggml_backend_dev_t device;
  ggml_backend_device_i stock;
  decltype(ggml_backend_buffer_type_i::alloc_buffer) stock_alloc;
};

struct HookedBackend {
  ggml_backend_i stock;
  std::unique_ptr<CudaBackendHook> hook;
};

struct CudaHook {
  std::vector<HookedDevice> devices;  // complete before any is hooked
  ggml_backend_reg_i stock_registry = {};
  bool extra_bufts = false;
  std::shared_mutex mutex;
  std::unordered_map<ggml_backend_t, HookedBackend> backends;
};

CudaHook& state() {
  static CudaHook* instance = new CudaHook;  // never destroyed: backends may be freed during the host's exit
  return *instance;
}

const HookedDevice* find_hooked(ggml_backend_dev_t device) {
  for (const HookedDevice& hooked : state().devices) {
    if (hooked.device == device) return &hooked;
  }
  return nullptr;
}

const HookedDevice& hooked_of(ggml_backend_dev_t device) {
  const HookedDevice* found = find_hooked(device);
  if (found == nullptr) std::abort();  // the functions below are in the tables of these devices only
  return *found;
}

const ggml_backend_device_i& stock_of(ggml_backend_dev_t device) { return hooked_of(device).stock; }

// The other weights of a model get their memory before any tensor is loaded: where they are, its experts are
// wanted. Empty buffers are the loader's questions.
ggml_backend_buffer_t hooked_alloc_buffer(ggml_backend_buffer_type_t type, std::size_t bytes) {
  if (bytes > 0) Session::instance().use_gpu(type->device);
  return hooked_of(type->device).stock_alloc(type, bytes);
}

CudaBackendHook* hook_of(ggml_backend_t backend) {
  CudaHook& cuda = state();
  const std::shared_lock lock(cuda.mutex);
  return cuda.backends.at(backend).hook.get();
}

ggml_status hooked_graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  return hook_of(backend)->compute(graph);
}

void hooked_free(ggml_backend_t backend) {
  CudaHook& cuda = state();
  HookedBackend freed;
  bool last = false;
  {
    const std::unique_lock lock(cuda.mutex);
    const auto found = cuda.backends.find(backend);
    freed = std::move(found->second);
    cuda.backends.erase(found);
    last = cuda.backends.empty();
  }
  if (last) Session::instance().write_stats();
  // Lanes first: they wait for events on the backend's stream.
  freed.hook.reset();
  freed.stock.free(backend);
}

ggml_backend_t hooked_init_backend(ggml_backend_dev_t device, const char* params) {
  ggml_backend_t backend = stock_of(device).init_backend(device, params);
  if (backend == nullptr) return nullptr;
  const ggml_backend_i stock = backend->iface;
  if (stock.event_record == nullptr || stock.event_wait == nullptr || stock.synchronize == nullptr) {
    say("no backend for %s: it has no events", device->iface.get_name(device));
    stock.free(backend);
    return nullptr;
  }
  CudaHook& cuda = state();
  const std::unique_lock lock(cuda.mutex);
  cuda.backends[backend] = {stock, std::make_unique<CudaBackendHook>(backend, stock)};
  backend->iface.graph_compute = hooked_graph_compute;
  backend->iface.free = hooked_free;
  return backend;
}

// The loader asks with the weight in an empty buffer whether the GPU's own memory would do for it.
bool is_loaders_question(ggml_backend_dev_t device, const ggml_tensor* op) {
  const int weight = op->op == GGML_OP_MUL_MAT_ID ? 0 : op->op == GGML_OP_ADD_ID ? 1 : -1;
  if (weight < 0 || op->src[weight] == nullptr) return false;
  const ggml_backend_buffer* buffer = op->src[weight]->buffer;
  return buffer != nullptr && buffer->size == 0 && buffer->buft == device->iface.get_buffer_type(device);
}

// Tensors of ours can be a source of the operations that the hook rewrites and of nothing else. Those that
// are not served on GPUs are in this process's memory, or in the daemon's slots there: the CPU computes them.
bool hooked_supports_op(ggml_backend_dev_t device, const ggml_tensor* op) {
  if (state().extra_bufts && is_loaders_question(device, op)) return false;
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* source = op->src[i];
    if (source == nullptr || !is_in_weight_buffer(source)) continue;
    const bool is_expert_op =
        (op->op == GGML_OP_MUL_MAT_ID && i == 0) || (op->op == GGML_OP_ADD_ID && i == 1);
    if (!is_expert_op || source->view_src != nullptr) return false;
    const ggml_backend_dev_t placed = device_of_router(*op);
    if (placed != device && placed != nullptr && find_hooked(placed) != nullptr) return false;
    if (source->data == nullptr) continue;  // a graph that is only measured, or the loader's question
    const ServedTensor* served = served_tensor(source);
    if (served == nullptr || (served->gpu == nullptr && served->spill == nullptr)) return false;
  }
  return stock_of(device).supports_op(device, op);
}

bool hooked_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
  return type == weight_buffer_type() || stock_of(device).supports_buft(device, type);
}

ggml_backend_buffer_type_t* extra_bufts(ggml_backend_dev_t) {
  static ggml_backend_buffer_type_t list[] = {weight_buffer_type(), nullptr};
  return list;
}

void* hooked_get_proc_address(ggml_backend_reg_t registry, const char* name) {
  const CudaHook& cuda = state();
  if (cuda.extra_bufts && std::strcmp(name, kExtraBufts) == 0) return reinterpret_cast<void*>(extra_bufts);
  if (cuda.stock_registry.get_proc_address == nullptr) return nullptr;
  return cuda.stock_registry.get_proc_address(registry, name);
}

// "" or what is not as in the headers that this plugin was built from.
std::string probe(ggml_backend_reg_t registry, ggml_backend_dev_t device) {
  if (registry->api_version != GGML_BACKEND_API_VERSION) return "the CUDA backend has another API version";
  const ggml_backend_device_i& table = device->iface;
  const bool same = device->reg == registry && table.get_name != nullptr &&
                    std::strncmp(table.get_name(device), "CUDA", 4) == 0 && table.init_backend != nullptr &&
                    table.supports_op != nullptr && table.supports_buft != nullptr &&
                    table.get_buffer_type != nullptr && table.get_buffer_type(device)->device == device &&
                    table.get_buffer_type(device)->iface.alloc_buffer != nullptr &&
                    table.event_new != nullptr && table.event_free != nullptr &&
                    table.event_synchronize != nullptr;
  return same ? "" : "ggml_backend_device of the CUDA backend is laid out differently";
}

}  // namespace

bool has_cuda_device() {
  ggml_backend_reg_t registry = host().ggml_backend_reg_by_name("CUDA");
  return registry != nullptr && registry->iface.get_device_count(registry) > 0;
}

std::string hook_cuda_devices() {
  CudaHook& cuda = state();
  if (!cuda.devices.empty()) return "";
  ggml_backend_reg_t registry = host().ggml_backend_reg_by_name("CUDA");
  std::vector<HookedDevice> devices;
  for (std::size_t i = 0; i < registry->iface.get_device_count(registry); ++i) {
    ggml_backend_dev_t device = registry->iface.get_device(registry, i);
    if (const std::string difference = probe(registry, device); !difference.empty()) return difference;
    devices.push_back({device, device->iface, device->iface.get_buffer_type(device)->iface.alloc_buffer});
  }
  if (devices.empty()) return "no CUDA device";
  cuda.devices = std::move(devices);
  install_fetch_hook(reinterpret_cast<const void*>(cuda.devices.front().stock.init_backend));
  const char* extra = std::getenv("MOECACHED_EXTRA_BUFTS");
  cuda.extra_bufts = extra != nullptr && std::strcmp(extra, "1") == 0;
  for (const HookedDevice& hooked : cuda.devices) {
    hooked.device->iface.init_backend = hooked_init_backend;
    hooked.device->iface.supports_op = hooked_supports_op;
    hooked.device->iface.supports_buft = hooked_supports_buft;
    hooked.stock.get_buffer_type(hooked.device)->iface.alloc_buffer = hooked_alloc_buffer;
  }
  cuda.stock_registry = registry->iface;
  registry->iface.get_proc_address = hooked_get_proc_address;
  Session::instance().use_gpu(cuda.devices.front().device);
  return "";
}

}  // namespace moecached::shim
