#include "shim/ggml/moe_device.h"

#include <atomic>
#include <cstddef>

#include "shim/ggml/log.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {
namespace {

extern ggml_backend_device g_device;

// Each llama_context makes a backend of every ACCEL device.
const char* backend_name(ggml_backend_t) { return "MOECACHE"; }
void backend_free(ggml_backend_t backend) { delete backend; }
ggml_status backend_compute(ggml_backend_t, ggml_cgraph*) {
  say("a graph was given to the MOECACHE device, which computes nothing: experts belong to the CPU backend");
  return GGML_STATUS_FAILED;
}

const char* device_name(ggml_backend_dev_t) { return "MOECACHE"; }
const char* device_description(ggml_backend_dev_t) { return "expert slots of moecached"; }
// Nothing to report: the memory is the daemon's, and the host must not plan with it.
void device_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) { *free = *total = 0; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }
void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  props->caps.mmap_support = true;  // else the host would not map the model
}
ggml_backend_t device_init(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {0x6d, 0x6f, 0x65, 0x63, 0x61, 0x63, 0x68, 0x65,
                           0x64, 0x2d, 0x77, 0x65, 0x69, 0x67, 0x68, 0x74};
  ggml_backend_i table = {};
  table.get_name = backend_name;
  table.free = backend_free;
  table.graph_compute = backend_compute;
  return new ggml_backend{&guid, table, device, nullptr};
}
ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) { return weight_buffer_type(); }

// True for the question that the loader asks before it places a weight, and for nothing that is computed:
// there the weight sits in an empty buffer and the ids are a fresh tensor, while in a graph they are the
// result of a top-k.
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
  // The scheduler asks its backends in order who holds a weight. Past the GPUs, this context has none of
  // CUDA, and the host is going to abort.
  if (op->op == GGML_OP_NONE && is_in_weight_buffer(op) && op->data != nullptr) {
    const ServedTensor* served = served_tensor(op);
    static std::atomic<bool> said{false};
    if (served != nullptr && served->gpu != nullptr && !said.exchange(true)) {
      say("%s is served on a GPU, and this context computes on no CUDA device of its own: `-sm tensor` and "
          "`--device none` "
          "do not go together with MOECACHE (MOECACHED_DEVICE=cpu serves experts on the CPU)",
          op->name);
    }
    return false;
  }
  const int weight = op->op == GGML_OP_MUL_MAT_ID ? 0 : op->op == GGML_OP_ADD_ID ? 1 : -1;
  if (weight < 0 || !is_in_weight_buffer(op->src[weight]) || op->src[2] == nullptr) return false;
  return op->src[weight]->buffer->size == 0 && op->src[2]->op == GGML_OP_NONE;
}
bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return type == weight_buffer_type();
}

const char* registry_name(ggml_backend_reg_t) { return "MOECACHE"; }
std::size_t registry_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t registry_device(ggml_backend_reg_t, std::size_t) { return &g_device; }
void* registry_function(ggml_backend_reg_t, const char*) { return nullptr; }

ggml_backend_reg g_registry = {
    GGML_BACKEND_API_VERSION, {registry_name, registry_count, registry_device, registry_function}, nullptr};

ggml_backend_device g_device = {{device_name, device_description, device_memory, device_type, device_props,
                                 device_init, device_buffer_type, nullptr, nullptr, device_supports_op,
                                 device_supports_buft, nullptr, nullptr, nullptr, nullptr},
                                &g_registry,
                                nullptr};

}  // namespace

ggml_backend_reg_t moe_registry() {
  set_weight_buffer_device(&g_device);
  return &g_registry;
}

}  // namespace moecached::shim
