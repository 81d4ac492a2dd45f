#include "shim/ggml/spill_wait_plan.h"

#include <algorithm>
#include <vector>

namespace moecached::shim {
namespace {

constexpr int64_t kIdsMax = SpillWaitPlan::kPitch / sizeof(int32_t);

}  // namespace

bool SpillWaitPlan::is_possible(std::span<const Layer> layers) {
  std::vector<bool> seen(kLayersMax);
  for (const Layer& layer : layers) {
    const ggml_tensor& ids = *layer.ids;
    if (ids.type != GGML_TYPE_I32 || ids.nb[0] != sizeof(int32_t) || ids.ne[1] > kVectorTokens ||
        ids.ne[0] * ids.ne[1] > kIdsMax || layer.layer >= kLayersMax || seen[layer.layer]) {
      return false;
    }
    if (ids.ne[1] > 1 && layer.n_experts > static_cast<int64_t>(kExpertsMax)) return false;
    seen[layer.layer] = true;
  }
  return !layers.empty();
}

void SpillWaitPlan::place(const ggml_cgraph& graph, std::span<const Layer> layers, const Memory& memory,
                          SlotsNodePool& pool) {
  memory_ = memory;
  placed_.clear();
  waits_.clear();
  nodes_.clear();
  nodes_.reserve(static_cast<std::size_t>(graph.n_nodes) + 2 * layers.size());
  int next = 0;
  for (const Layer& layer : layers) {
    const bool is_dense = layer.ids->ne[1] == 1;
    const SlotsKey key = {is_dense ? 0 : memory.identity(),
                          memory.buffer,
                          static_cast<uint64_t>(layer.n_experts),
                          layer.ids,
                          layer.ids->data,
                          layer.ids->ne[0],
                          layer.ids->ne[1],
                          is_dense ? reinterpret_cast<uint64_t>(layer.ids->data) : memory.dense(layer.layer),
                          memory.buffer,
                          memory.slots(layer.layer),
                          memory.generation};
    placed_.push_back(pool.get(key, layer.layer, *layer.ids));
    waits_.push_back(
        {key.fetched, key.slots, static_cast<uint32_t>(layer.ids->ne[0] * layer.ids->ne[1]), layer.layer, 0});
    nodes_.insert(nodes_.end(), graph.nodes + next, graph.nodes + layer.position);
    next = layer.position;
    if (!is_dense) nodes_.push_back(&placed_.back()->rows);
    nodes_.push_back(&placed_.back()->fetched);
  }
  nodes_.insert(nodes_.end(), graph.nodes + next, graph.nodes + graph.n_nodes);
  std::sort(waits_.begin(), waits_.end(),
            [](const PlannedFetch& left, const PlannedFetch& right) { return left.fetched < right.fetched; });
}

ggml_cgraph SpillWaitPlan::graph(const ggml_cgraph& host) {
  ggml_cgraph graph = host;
  graph.nodes = nodes_.data();
  graph.n_nodes = static_cast<int>(nodes_.size());
  graph.size = std::max(graph.size, graph.n_nodes);
  return graph;
}

}  // namespace moecached::shim
