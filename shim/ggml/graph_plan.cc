#include "shim/ggml/graph_plan.h"

#include <cstdio>
#include <cstring>

namespace moecached::shim {
namespace {

int weight_source_of(const ggml_tensor& node) {
  if (node.op == GGML_OP_MUL_MAT_ID) return 0;
  if (node.op == GGML_OP_ADD_ID) return 1;
  return -1;
}

}  // namespace

ResolveNode* GraphPlan::add_resolve(const ServedTensor& first, const ggml_tensor& ids,
                                    ggml_custom_op_t resolve, void* owner) {
  if (n_resolves_ == resolves_.size()) resolves_.push_back(std::make_unique<ResolveNode>());
  ResolveNode& added = *resolves_[n_resolves_++];
  const int64_t columns = ids.ne[0];
  const int64_t rows = ids.ne[1];
  added.ids = &ids;
  added.first = &first;
  added.position = nodes_.size();
  added.owner = owner;
  added.lane = nullptr;
  added.slots.resize(static_cast<std::size_t>(columns * rows));
  ggml_tensor& tensor = added.tensor;
  tensor = {};
  tensor.type = GGML_TYPE_I32;
  tensor.op = GGML_OP_CUSTOM;
  tensor.flags = GGML_TENSOR_FLAG_COMPUTE;  // else ggml skips the node in silence
  tensor.ne[0] = columns;
  tensor.ne[1] = rows;
  tensor.ne[2] = tensor.ne[3] = 1;
  tensor.nb[0] = sizeof(int32_t);
  for (int i = 1; i < GGML_MAX_DIMS; ++i)
    tensor.nb[i] = tensor.nb[i - 1] * static_cast<std::size_t>(tensor.ne[i - 1]);
  tensor.data = added.slots.data();
  const ggml_custom_op_params params = {resolve, 1, &added};
  std::memcpy(tensor.op_params, &params, sizeof params);
  std::snprintf(tensor.name, sizeof tensor.name, "moecache_slots-%u", added.layer());
  nodes_.push_back(&tensor);
  return &added;
}

bool GraphPlan::build(const ggml_cgraph& graph, ggml_custom_op_t resolve, void* owner) {
  graph_ = graph;
  nodes_.clear();
  operations_.clear();
  n_resolves_ = 0;
  ResolveNode* current = nullptr;
  for (int i = 0; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    const int source = weight_source_of(*node);
    if (source >= 0 && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 &&
        is_in_weight_buffer(node->src[source])) {
      if (const ServedTensor* served = served_tensor(node->src[source])) {
        // A resolve ends the one before it, so slots are only good until the next layer's.
        const bool same = current != nullptr && current->ids == node->src[2] &&
                          current->layer() == served->window->layer && current->first->model == served->model;
        if (!same) current = add_resolve(*served, *node->src[2], resolve, owner);
        operations_.push_back(
            {node, source, node->src[source], node->src[2], served, current, nodes_.size()});
      }
    }
    nodes_.push_back(node);
  }
  return !operations_.empty();
}

void GraphPlan::swap() {
  for (const SwappedOp& operation : operations_) {
    // Stock kernels only read this source; the window tensor is shared by all lanes.
    operation.node->src[operation.weight_source] =
        const_cast<ggml_tensor*>(&operation.served->window->window);
    operation.node->src[2] = &operation.resolve->tensor;
  }
}

void GraphPlan::restore() {
  for (const SwappedOp& operation : operations_) {
    operation.node->src[operation.weight_source] = operation.weight;
    operation.node->src[2] = operation.ids;
  }
}

ggml_cgraph GraphPlan::range(std::size_t begin, std::size_t end) {
  ggml_cgraph part = graph_;
  part.nodes = nodes_.data() + begin;
  part.n_nodes = static_cast<int>(end - begin);
  part.size = part.n_nodes;
  part.uid = 0;  // not the graph that the host knows under this number
  return part;
}

}  // namespace moecached::shim
