#include "tests/unit/shim/mini_gpu.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "shim/ggml/host_api.h"
#include "tests/unit/shim/fake_client.h"

namespace moecached::testing {
namespace {

std::size_t g_buffers = 0;
std::size_t g_events = 0;

struct Gpu {
  ggml_backend_device device = {};
  ggml_backend_buffer_type type = {};
  const char* name = nullptr;
  const char* bus_id = nullptr;
};

Gpu& of(ggml_backend_dev_t device) { return *static_cast<Gpu*>(device->context); }

void call(const std::string& what) { fake_daemon().calls.push_back(what); }

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, std::size_t bytes) {
  if (mini_gpu_faults().no_memory) return nullptr;
  ggml_backend_buffer_i table = {};
  table.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
  table.free_buffer = [](ggml_backend_buffer_t buffer) {
    std::free(buffer->context);
    --g_buffers;
  };
  table.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
  };
  table.set_tensor = [](ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, std::size_t offset,
                        std::size_t n) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, n);
  };
  ++g_buffers;
  return new ggml_backend_buffer{table, type, std::calloc(1, bytes == 0 ? 1 : bytes), bytes,
                                 GGML_BACKEND_BUFFER_USAGE_ANY};
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  call("compute");
  if (mini_gpu_faults().compute != GGML_STATUS_SUCCESS) return mini_gpu_faults().compute;
  auto* mini = static_cast<MiniBackend*>(backend->context);
  mini->uids.push_back(graph->uid);
  return MiniBackend::compute(backend, graph);
}

void make(Gpu& gpu, ggml_backend_reg_t registry, const char* name, const char* bus_id) {
  gpu.name = name;
  gpu.bus_id = bus_id;
  gpu.type.iface.get_name = [](ggml_backend_buffer_type_t) { return "CUDA"; };
  gpu.type.iface.alloc_buffer = allocate;
  gpu.type.device = &gpu.device;
  gpu.device.reg = registry;
  gpu.device.context = &gpu;
  ggml_backend_device_i& table = gpu.device.iface;
  table.get_name = [](ggml_backend_dev_t device) { return of(device).name; };
  table.get_props = [](ggml_backend_dev_t device, ggml_backend_dev_props* props) {
    *props = {};
    props->device_id = of(device).bus_id;
  };
  table.get_buffer_type = [](ggml_backend_dev_t device) { return &of(device).type; };
  table.init_backend = [](ggml_backend_dev_t device, const char*) {
    auto* mini = new MiniBackend;
    make_gpu_backend(*mini, device);
    return &mini->backend;
  };
  table.supports_op = [](ggml_backend_dev_t, const ggml_tensor* op) { return op->op != GGML_OP_IM2COL; };
  table.supports_buft = [](ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == &of(device).type;
  };
  table.event_new = [](ggml_backend_dev_t device) -> ggml_backend_event_t {
    if (mini_gpu_faults().no_events) return nullptr;
    ++g_events;
    auto* event = new ggml_backend_event{device, nullptr};
    event->context = event;
    return event;
  };
  table.event_free = [](ggml_backend_dev_t, ggml_backend_event_t event) {
    --g_events;
    delete event;
  };
  table.event_synchronize = [](ggml_backend_dev_t, ggml_backend_event_t) { call("event_synchronize"); };
}

}  // namespace

MiniGpuFaults& mini_gpu_faults() {
  static MiniGpuFaults faults;
  return faults;
}

std::size_t mini_gpu_buffers() { return g_buffers; }
std::size_t mini_gpu_events() { return g_events; }

void make_gpu_backend(MiniBackend& mini, ggml_backend_dev_t device) {
  mini.backend.device = device;
  ggml_backend_i& table = mini.backend.iface;
  table.graph_compute = compute;
  table.event_record = [](ggml_backend_t, ggml_backend_event_t) { call("event_record"); };
  table.event_wait = [](ggml_backend_t, ggml_backend_event_t) { call("event_wait"); };
  table.synchronize = [](ggml_backend_t) { call("synchronize"); };
  table.get_tensor_async = [](ggml_backend_t, const ggml_tensor* tensor, void* data, std::size_t offset,
                              std::size_t bytes) {
    call("get");
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, bytes);
  };
  table.free = [](ggml_backend_t backend) {
    call("free");
    delete static_cast<MiniBackend*>(backend->context);
  };
}

ggml_backend_reg_t mini_gpu_registry() {
  static ggml_backend_reg registry = {};
  static Gpu gpus[2];
  if (registry.api_version == 0) {
    registry.api_version = GGML_BACKEND_API_VERSION;
    make(gpus[0], &registry, "CUDA0", "0000:00:00.0");
    make(gpus[1], &registry, "CUDA1", "0000:01:00.0");
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> std::size_t { return 2; };
    registry.iface.get_device = [](ggml_backend_reg_t, std::size_t i) { return &gpus[i].device; };
    registry.iface.get_proc_address = [](ggml_backend_reg_t, const char*) -> void* { return nullptr; };
  }
  return &registry;
}

ggml_backend_dev_t mini_gpu(std::size_t index) {
  return mini_gpu_registry()->iface.get_device(mini_gpu_registry(), index);
}

}  // namespace moecached::testing
