#include "shim/ggml/cuda_plan.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace moecached::shim {
namespace {

constexpr std::size_t kPitchAlignment = 256;  // what CUDA aligns allocations to

void set_shape(ggml_tensor& tensor, int64_t ne0, int64_t ne1, int64_t ne2) {
  tensor.type = GGML_TYPE_I32;
  tensor.ne[0] = ne0;
  tensor.ne[1] = ne1;
  tensor.ne[2] = ne2;
  tensor.ne[3] = 1;
  tensor.nb[0] = sizeof(int32_t);
  for (int i = 1; i < GGML_MAX_DIMS; ++i)
    tensor.nb[i] = tensor.nb[i - 1] * static_cast<std::size_t>(tensor.ne[i - 1]);
}

std::size_t row_bytes(const ggml_tensor& ids) {
  return static_cast<std::size_t>(ids.ne[0] * ids.ne[1]) * sizeof(int32_t);
}

}  // namespace

int weight_source_of(const ggml_tensor& node) {
  if (node.op == GGML_OP_MUL_MAT_ID) return 0;
  if (node.op == GGML_OP_ADD_ID) return 1;
  return -1;
}

std::shared_ptr<SlotsNode> SlotsNodePool::get(const SlotsKey& key, uint32_t layer, const ggml_tensor& ids) {
  if (const auto found = nodes_.find(key); found != nodes_.end()) return found->second;
  if (nodes_.size() >= kMax)
    std::erase_if(nodes_, [](const auto& entry) { return entry.second.use_count() == 1; });
  auto node = std::make_shared<SlotsNode>();
  nodes_.emplace(key, node);

  ggml_tensor* last = const_cast<ggml_tensor*>(&ids);  // only read
  if (key.table != 0) {
    ggml_tensor& table = node->table;
    set_shape(table, 1, static_cast<int64_t>(key.n_experts), key.tokens);
    table.nb[2] = 0;  // GET_ROWS takes its rows from plane t for token t
    table.nb[3] = table.nb[1] * key.n_experts;
    table.op = GGML_OP_NONE;
    table.buffer = static_cast<ggml_backend_buffer_t>(const_cast<void*>(key.table_buffer));
    table.data = reinterpret_cast<void*>(key.table);
    std::snprintf(table.name, sizeof table.name, "moecache_table-%u", layer);

    ggml_tensor& rows = node->rows;
    set_shape(rows, 1, key.columns, key.tokens);
    rows.op = GGML_OP_GET_ROWS;
    rows.flags = GGML_TENSOR_FLAG_COMPUTE;  // else it is skipped in silence: stale slots, fluent wrong text
    rows.src[0] = &table;
    rows.src[1] = last;
    rows.buffer = static_cast<ggml_backend_buffer_t>(const_cast<void*>(key.slots_buffer));
    rows.data = reinterpret_cast<void*>(key.slots);
    std::snprintf(rows.name, sizeof rows.name, "moecache_slots-%u", layer);
    last = &rows;
  }

  if (key.fetched != 0) {
    ggml_tensor& fetched = node->fetched;
    if (key.table != 0) {
      set_shape(fetched, 1, key.columns, key.tokens);
    } else {
      set_shape(fetched, key.columns, key.tokens, 1);
    }
    fetched.op = GGML_OP_CONT;
    fetched.flags = GGML_TENSOR_FLAG_COMPUTE;
    fetched.src[0] = last;
    fetched.buffer = static_cast<ggml_backend_buffer_t>(const_cast<void*>(key.slots_buffer));
    fetched.data = reinterpret_cast<void*>(key.fetched);
    // Stock captures again when a node's bytes changed, these too.
    std::memcpy(fetched.op_params, &key.generation, sizeof key.generation);
    std::snprintf(fetched.name, sizeof fetched.name, "moecache_fetch-%u", layer);
    last = &fetched;
  }

  ggml_tensor& view = node->ids;
  set_shape(view, key.columns, key.tokens, 1);
  view.op = GGML_OP_RESHAPE;
  view.flags = GGML_TENSOR_FLAG_COMPUTE;
  view.src[0] = view.view_src = last;
  view.buffer = last->buffer;
  view.data = last->data;
  std::snprintf(view.name, sizeof view.name, "moecache_ids-%u", layer);
  return node;
}

std::size_t CudaPlan::share_of(const GpuModel* model) {
  for (std::size_t i = 0; i < shares_.size(); ++i) {
    if (shares_[i].model == model) return i;
  }
  shares_.emplace_back().model = model;
  return shares_.size() - 1;
}

std::size_t CudaPlan::row_of(const GpuWindow& window, const ggml_tensor& ids, std::size_t position) {
  // From the end: the operations of a layer follow each other.
  for (std::size_t i = rows_.size(); i-- > 0;) {
    const Row& row = rows_[i];
    if (row.ids == &ids && row.window->layer == window.layer && row.window->model == window.model) return i;
  }
  rows_.push_back(
      {&window, &ids, share_of(window.model), position, 0, ids.ne[1] <= kVectorTokens, 0, false, nullptr});
  return rows_.size() - 1;
}

void CudaPlan::note_whole(const GpuWindow& window, const ggml_tensor& ids) {
  Share& share = shares_[share_of(window.model)];
  if (ids.ne[0] != static_cast<int64_t>(window.n_expert_used)) return;
  const auto layer = static_cast<uint16_t>(window.layer);
  share.n_whole_tokens = std::max(share.n_whole_tokens, static_cast<uint32_t>(ids.ne[1]));
  if (std::find(share.whole_layers.begin(), share.whole_layers.end(), layer) == share.whole_layers.end())
    share.whole_layers.push_back(layer);
}

// Gives each row its place in the slots of its share: those worth logging first.
void CudaPlan::order_rows() {
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    Share& share = shares_[s];
    const auto is_routed = [&](const Row& row) {
      return row.share == s && row.ids->ne[0] == static_cast<int64_t>(row.window->n_expert_used);
    };
    int64_t n_tokens = 0;
    std::size_t pitch = 0;
    for (const Row& row : rows_) {
      if (row.share != s) continue;
      ++share.n_rows;
      pitch = std::max(pitch, row_bytes(*row.ids));
      // Of a prompt, the last layer computes the tokens whose output is wanted and no others.
      if (is_routed(row)) n_tokens = std::max(n_tokens, row.ids->ne[1]);
    }
    share.pitch_bytes = (pitch + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
    share.n_tokens = static_cast<uint32_t>(n_tokens);
    std::vector<const Row*> logged;
    for (Row& row : rows_) {
      const auto layer =
          static_cast<uint16_t>(row.window->layer | (row.window->by_expert ? MOECACHED_GPU_BY_EXPERT : 0));
      if (!is_routed(row) || row.ids->ne[1] != n_tokens ||
          std::find(share.layers.begin(), share.layers.end(), layer) != share.layers.end()) {
        continue;
      }
      row.index = share.layers.size();
      share.layers.push_back(layer);
      logged.push_back(&row);
    }
    std::size_t next = logged.size();
    for (Row& row : rows_) {
      if (row.share == s && std::find(logged.begin(), logged.end(), &row) == logged.end()) row.index = next++;
    }
    for (Row& row : rows_) {
      if (row.share == s && row.fetchable) row.fetched_index = next++;
    }
    share.n_fetchable = next - share.n_rows;
  }
}

void CudaPlan::find(const ggml_cgraph& graph, const WindowOf& window_of) {
  graph_ = graph;
  operations_.clear();
  rows_.clear();
  shares_.clear();
  placed_.clear();
  nodes_.clear();
  for (int i = 0; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    const int source = weight_source_of(*node);
    if (source < 0 || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    ggml_tensor* ids = node->src[2];
    // A batch of which no output is wanted: stock skips operations on nothing, and looks at no source.
    if (ids->ne[0] == 0 || ids->ne[1] == 0) continue;
    const GpuWindow* window = window_of(*node->src[source]);
    if (window == nullptr) continue;
    std::size_t row = kNoRow;
    if (window->whole) {
      note_whole(*window, *ids);
    } else {
      row = row_of(*window, *ids, static_cast<std::size_t>(i));
    }
    operations_.push_back({node, source, node->src[source], ids, window, row});
  }
  order_rows();
}

bool CudaPlan::is_for(const ggml_cgraph& graph) const {
  return graph.uid == graph_.uid && graph.nodes == graph_.nodes && graph.n_nodes == graph_.n_nodes;
}

bool CudaPlan::is_placed(std::span<const SlotsMemory> memory) const {
  return std::equal(memory.begin(), memory.end(), placed_.begin(), placed_.end(),
                    // A new buffer may be at the address of the old one.
                    [](const SlotsMemory& left, const SlotsMemory& right) {
                      return left.address == right.address && left.buffer == right.buffer &&
                             left.n_scratch == right.n_scratch && left.generation == right.generation;
                    });
}

void CudaPlan::place(std::span<const SlotsMemory> memory, SlotsNodePool& pool) {
  placed_.assign(memory.begin(), memory.end());
  fetches_.clear();
  for (Row& row : rows_) {
    const SlotsMemory& slots = memory[row.share];
    const std::size_t pitch = shares_[row.share].pitch_bytes;
    const int64_t n_ids = row.ids->ne[0] * row.ids->ne[1];
    row.fetches = row.fetchable && row.window->fetches && n_ids <= static_cast<int64_t>(slots.n_scratch);
    const uint64_t fetched = row.fetches ? slots.address + row.fetched_index * pitch : 0;
    const SlotsKey key = {row.window->table,
                          row.window->tensor.buffer,
                          static_cast<uint64_t>(row.window->n_experts),
                          row.ids,
                          row.ids->data,
                          row.ids->ne[0],
                          row.ids->ne[1],
                          slots.address + row.index * pitch,
                          slots.buffer,
                          fetched,
                          row.fetches ? slots.generation : 0};
    row.node = pool.get(key, row.window->layer, *row.ids);
    if (row.fetches) {
      const uint32_t layer = row.window->layer | (row.window->by_expert ? MOECACHED_GPU_BY_EXPERT : 0u);
      fetches_.push_back({fetched, key.slots, static_cast<uint32_t>(n_ids), layer, row.share});
    }
  }
  std::sort(fetches_.begin(), fetches_.end(),
            [](const PlannedFetch& left, const PlannedFetch& right) { return left.fetched < right.fetched; });
  nodes_.clear();
  nodes_.reserve(static_cast<std::size_t>(graph_.n_nodes) + rows_.size() + fetches_.size());
  std::size_t next = 0;  // rows are in the order of their positions
  for (std::size_t i = 0; i < static_cast<std::size_t>(graph_.n_nodes); ++i) {
    for (; next < rows_.size() && rows_[next].position == i; ++next) {
      nodes_.push_back(&rows_[next].node->rows);
      if (rows_[next].fetches) nodes_.push_back(&rows_[next].node->fetched);
    }
    nodes_.push_back(graph_.nodes[i]);
  }
  is_new_ = true;
}

void CudaPlan::swap() {
  for (const Operation& operation : operations_) {
    const bool looked_up = operation.row != kNoRow;
    const bool fetches = looked_up && rows_[operation.row].fetches;
    // Stock kernels only read this source; the window tensor is shared by all lanes.
    operation.node->src[operation.weight_source] =
        const_cast<ggml_tensor*>(fetches ? &operation.window->fetched : &operation.window->tensor);
    if (looked_up) operation.node->src[2] = &rows_[operation.row].node->ids;
  }
}

void CudaPlan::restore() {
  for (const Operation& operation : operations_) {
    operation.node->src[operation.weight_source] = operation.weight;
    operation.node->src[2] = operation.ids;
  }
}

ggml_cgraph CudaPlan::graph(const ggml_cgraph& host) {
  ggml_cgraph graph = host;
  graph.nodes = nodes_.data();
  graph.n_nodes = static_cast<int>(nodes_.size());
  graph.size = std::max(graph.size, graph.n_nodes);
  // Stock takes an equal number for an equal graph and launches what it captured. Under this number it may
  // have captured an older plan: without one it compares the nodes.
  if (is_new_) graph.uid = 0;
  is_new_ = false;
  return graph;
}

}  // namespace moecached::shim
