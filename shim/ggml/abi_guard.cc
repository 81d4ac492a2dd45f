#include "shim/ggml/abi_guard.h"

#include <array>
#include <cstring>

#include "ggml-impl.h"
#include "shim/ggml/host_api.h"

namespace moecached::shim {
namespace {

struct KnownBuild {
  std::string_view version;
  std::string_view commit;
};
// llama.cpp v0.5.0, as node-llama-cpp 3.22 ships it.
constexpr std::array<KnownBuild, 1> kKnownBuilds = {{{"0.25.1", "0ad4a86"}}};

// A release tree unpacked without its history says "unknown"; one put under a local git (node-llama-cpp's
// `source` command does) names a commit of that machine with "-dirty". Neither says which upstream commit it
// is: the version and the layout probe have to do.
bool has_no_upstream_commit(std::string_view commit) {
  return commit == "unknown" || commit.ends_with("-dirty");
}

void probe_callback(ggml_tensor*, int, int, void*) {}

std::string probe_graph(ggml_context* context) {
  constexpr int kNodes = 8;
  const ggml_cgraph* graph = host().ggml_new_graph_custom(context, kNodes, false);
  if (graph == nullptr) return "no graph could be made";
  // The host puts the node array right behind the structure: its address is the structure's size.
  const bool same = graph->size == kNodes && graph->n_nodes == 0 && graph->n_leafs == 0 &&
                    static_cast<const void*>(graph->nodes) == static_cast<const void*>(graph + 1) &&
                    graph->leafs == graph->nodes + kNodes && graph->grads == nullptr && graph->uid == 0 &&
                    graph->order == GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT;
  return same ? "" : "ggml_cgraph is laid out differently";
}

std::string probe_tensor(ggml_context* context) {
  constexpr std::size_t kObjectBytes = 32;  // ggml_object
  if (host().ggml_tensor_overhead() != sizeof(ggml_tensor) + kObjectBytes)
    return "ggml_tensor has another size";
  int mark = 0;
  const ggml_tensor* custom =
      host().ggml_custom_4d(context, GGML_TYPE_I32, 3, 5, 1, 1, nullptr, 0, probe_callback, 1, &mark);
  if (custom == nullptr || custom->op != GGML_OP_CUSTOM || custom->type != GGML_TYPE_I32 ||
      custom->ne[0] != 3 || custom->ne[1] != 5 || custom->nb[1] != 12) {
    return "ggml_tensor is laid out differently";
  }
  ggml_custom_op_params params;
  std::memcpy(&params, custom->op_params, sizeof params);
  if (params.fun != probe_callback || params.n_tasks != 1 || params.userdata != &mark) {
    return "ggml_custom_op_params is laid out differently";
  }
  struct {
    ggml_op op;
    const char* name;
  } const ops[] = {
      {GGML_OP_MUL_MAT_ID, "MUL_MAT_ID"}, {GGML_OP_ADD_ID, "ADD_ID"}, {GGML_OP_CUSTOM, "CUSTOM"}};
  for (const auto& op : ops) {
    if (std::strcmp(host().ggml_op_name(op.op), op.name) != 0) return "operations are numbered differently";
  }
  return "";
}

std::string probe_buffer() {
  int mark = 0;
  ggml_backend_buffer_i interface = {};
  ggml_backend_buffer_t buffer = host().ggml_backend_buffer_init(nullptr, interface, &mark, 4711);
  if (buffer == nullptr) return "no buffer could be made";
  const bool same = buffer->context == &mark && buffer->size == 4711 && buffer->buft == nullptr &&
                    buffer->usage == GGML_BACKEND_BUFFER_USAGE_ANY && buffer->iface.free_buffer == nullptr;
  host().ggml_backend_buffer_free(buffer);
  return same ? "" : "ggml_backend_buffer is laid out differently";
}

std::string probe_device() {
  ggml_backend_dev_t device = host().ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) return "";  // said elsewhere
  if (device->reg == nullptr || device->reg->api_version != GGML_BACKEND_API_VERSION) {
    return "the CPU backend has another API version";
  }
  // The CPU device has neither events nor offload: a table with other members in between would show here.
  const ggml_backend_device_i& table = device->iface;
  const bool same = table.get_name != nullptr && std::strcmp(table.get_name(device), "CPU") == 0 &&
                    table.get_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU && table.init_backend != nullptr &&
                    table.supports_op != nullptr && table.supports_buft != nullptr &&
                    table.get_host_buffer_type == nullptr && table.offload_op == nullptr &&
                    table.event_new == nullptr && table.event_free == nullptr &&
                    table.event_synchronize == nullptr &&
                    device->reg->iface.get_device(device->reg, 0) == device;
  return same ? "" : "ggml_backend_device is laid out differently";
}

}  // namespace

BuildVerdict judge_build(std::string_view version, std::string_view commit,
                         std::string_view allowed_by_user) {
  for (const KnownBuild& build : kKnownBuilds) {
    if (build.version == version && (build.commit == commit || has_no_upstream_commit(commit))) {
      return BuildVerdict::kKnown;
    }
  }
  if (!allowed_by_user.empty() && allowed_by_user == version) return BuildVerdict::kAllowedByUser;
  return BuildVerdict::kUnknown;
}

std::string known_builds() {
  std::string text;
  for (const KnownBuild& build : kKnownBuilds) {
    if (!text.empty()) text += ", ";
    text += std::string(build.version) + " (llama.cpp v0.5.0: commit " + std::string(build.commit) +
            ", or a copy of that release without its git history)";
  }
  return text;
}

std::string probe_layout() {
  ggml_init_params params = {};
  params.mem_size = 64 * 1024;
  params.no_alloc = true;
  ggml_context* context = host().ggml_init(params);
  if (context == nullptr) return "no ggml context could be made";
  std::string difference = probe_graph(context);
  if (difference.empty()) difference = probe_tensor(context);
  host().ggml_free(context);
  if (difference.empty()) difference = probe_buffer();
  if (difference.empty()) difference = probe_device();
  return difference;
}

}  // namespace moecached::shim
