// A copy of a graph in which expert operations use slots.
//
// For each layer one CUSTOM node is put right before the first operation that uses its ids; its callback, run
// inside the host's own graph compute, turns expert ids into slots. The operations themselves are the host's
// nodes: their weight and ids sources are swapped for the window and the slots while the graph runs, and put
// back afterwards.
//
//   host's nodes:  ... topk  MUL_MAT_ID(gate)  MUL_MAT_ID(up)  ...  MUL_MAT_ID(down) ...
//   plan's nodes:  ... topk  CUSTOM  MUL_MAT_ID'  MUL_MAT_ID'  ...  MUL_MAT_ID' ...
//
// Stock fusion is not disturbed: it looks at neighbours that end in MUL, and use counts are those of the
// host's graph. Thread: the backend's. Memory: everything is kept for the next graph; a steady state
// allocates nothing.
#ifndef MOECACHED_SHIM_GGML_GRAPH_PLAN_H_
#define MOECACHED_SHIM_GGML_GRAPH_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-impl.h"
#include "ggml.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {

// The resolving node of one layer, and where its slots go.
struct ResolveNode {
  ggml_tensor tensor;         // CUSTOM, I32 [columns, rows]: the slots
  const ggml_tensor* ids;     // the host's expert ids
  const ServedTensor* first;  // names the model and the layer
  std::size_t position;       // in the plan's nodes
  void* owner;                // for the callback
  moecached_lane* lane;       // set by the owner before the graph runs
  std::vector<int32_t> slots;
  std::vector<int32_t> dense_ids;  // for ids whose columns are not adjacent

  uint32_t layer() const { return first->window->layer; }
};

// One expert operation, swapped while the graph runs.
struct SwappedOp {
  ggml_tensor* node;
  int weight_source;    // 0 or 1; ids are source 2
  ggml_tensor* weight;  // the host's
  ggml_tensor* ids;     // the host's
  const ServedTensor* served;
  ResolveNode* resolve;
  std::size_t position;  // in the plan's nodes
};

class GraphPlan {
 public:
  // Plans the graph; false when it uses no tensor of ours, and nothing is to be done then.
  // resolve: called by all threads of the backend, with the ResolveNode as userdata.
  bool build(const ggml_cgraph& graph, ggml_custom_op_t resolve, void* owner);

  void swap();
  void restore();

  // A graph of the plan's nodes [begin, end). Valid until the next build().
  ggml_cgraph range(std::size_t begin, std::size_t end);
  std::size_t size() const { return nodes_.size(); }
  // The expert operations, in the order of the nodes.
  const std::vector<SwappedOp>& operations() const { return operations_; }
  std::size_t n_resolves() const { return n_resolves_; }
  ResolveNode& resolve_node(std::size_t i) { return *resolves_[i]; }

 private:
  ResolveNode* add_resolve(const ServedTensor& first, const ggml_tensor& ids, ggml_custom_op_t resolve,
                           void* owner);

  ggml_cgraph graph_ = {};
  std::vector<ggml_tensor*> nodes_;
  std::vector<SwappedOp> operations_;
  std::vector<std::unique_ptr<ResolveNode>> resolves_;  // pointers stay valid when the list grows
  std::size_t n_resolves_ = 0;                          // in use
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_GRAPH_PLAN_H_
