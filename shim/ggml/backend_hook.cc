#include "shim/ggml/backend_hook.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <string>

#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {

BackendHook::~BackendHook() {
  for (const Lane& lane : lanes_) moecached_lane_close(lane.lane);
}

void BackendHook::set_host_abort(ggml_abort_callback callback, void* data) {
  host_abort_ = callback;
  host_abort_data_ = data;
}

bool BackendHook::abort_callback(void* hook) {
  const auto* self = static_cast<const BackendHook*>(hook);
  if (self->stopped_at_ != nullptr) return true;
  return self->host_abort_ != nullptr && self->host_abort_(self->host_abort_data_);
}

void BackendHook::resolve_callback(ggml_tensor*, int thread, int, void* node) {
  // All threads of the backend come here; ggml's barrier behind the node holds the others until this one is
  // done.
  if (thread != 0) return;
  auto* resolve = static_cast<ResolveNode*>(node);
  static_cast<BackendHook*>(resolve->owner)->resolve(*resolve);
}

void BackendHook::resolve(ResolveNode& node) {
  const auto columns = static_cast<std::size_t>(node.ids->ne[0]);
  const auto rows = static_cast<std::size_t>(node.ids->ne[1]);
  const auto* ids = static_cast<const int32_t*>(node.ids->data);
  std::size_t stride = node.ids->nb[1];
  if (node.ids->nb[0] != sizeof(int32_t)) {
    node.dense_ids.resize(columns * rows);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t column = 0; column < columns; ++column) {
        std::memcpy(
            &node.dense_ids[row * columns + column],
            static_cast<const char*>(node.ids->data) + row * node.ids->nb[1] + column * node.ids->nb[0],
            sizeof(int32_t));
      }
    }
    ids = node.dense_ids.data();
    stride = columns * sizeof(int32_t);
  }
  const moecached_status status =
      moecached_lane_resolve(node.lane, node.layer(), ids, rows, columns, stride, node.slots.data());
  if (status == MOECACHED_OK) return;
  // Nothing behind this node is computed when the abort callback is in place. Should it not be, then with
  // slots in range.
  std::fill(node.slots.begin(), node.slots.end(), 0);
  stopped_at_ = &node;
  stop_status_ = status;
  if (status != MOECACHED_E_TOO_MANY) say("layer %u: %s", node.layer(), moecached_last_error());
}

moecached_lane* BackendHook::lane_of(const ServedTensor& served) {
  for (const Lane& lane : lanes_) {
    if (lane.model == served.model) return lane.lane;
  }
  moecached_lane* lane = nullptr;
  if (moecached_lane_open(served.model->handle(), &lane) != MOECACHED_OK) {
    say("no lane for this context: %s", moecached_last_error());
    return nullptr;
  }
  lanes_.push_back({served.model, lane});
  return lane;
}

bool BackendHook::assign_lanes() {
  for (std::size_t i = 0; i < plan_.n_resolves(); ++i) {
    ResolveNode& node = plan_.resolve_node(i);
    node.lane = lane_of(*node.first);
    if (node.lane == nullptr) return false;
  }
  return true;
}

ggml_status BackendHook::run_range(std::size_t begin, std::size_t end) {
  if (begin == end) return GGML_STATUS_SUCCESS;
  ggml_cgraph part = plan_.range(begin, end);
  return stock_(backend_, &part);
}

ggml_status BackendHook::compute_node(ggml_tensor& node) {
  ggml_tensor* nodes[] = {&node};
  ggml_cgraph graph = plan_.range(0, 0);
  graph.nodes = nodes;
  graph.n_nodes = graph.size = 1;
  return stock_(backend_, &graph);
}

// The expert operations of one resolving node in waves, the nodes between them as they are. `at` is moved
// behind the last.
ggml_status BackendHook::run_in_waves(const ResolveNode& node, std::size_t& at) {
  GraphCounters& counters = Session::instance().counters();
  ++counters.cut_layers;
  const uint64_t waves_before = waves_.waves();
  at = node.position + 1;
  ggml_status status = GGML_STATUS_SUCCESS;
  for (const SwappedOp& operation : plan_.operations()) {
    if (operation.resolve != &node) continue;
    // No other resolving node lies between operations of one: that would have started a new one.
    status = run_range(at, operation.position);
    if (status != GGML_STATUS_SUCCESS) break;
    const Model& model = *operation.served->model;
    const ExpertOp op = {operation.node, operation.ids, operation.served->window,
                         model.experts_of(operation.served->window->layer)};
    status = waves_.run(node.lane, op, *this);
    if (status != GGML_STATUS_SUCCESS) break;
    at = operation.position + 1;
  }
  counters.waves += waves_.waves() - waves_before;
  return status;
}

ggml_status BackendHook::run() {
  std::size_t at = 0;
  while (at < plan_.size()) {
    ggml_status status = run_range(at, plan_.size());
    const ResolveNode* stopped = stopped_at_;
    stopped_at_ = nullptr;
    if (stopped == nullptr) return status;  // done, or stopped by the host, or failed
    if (stop_status_ != MOECACHED_E_TOO_MANY) return GGML_STATUS_FAILED;
    if (status == GGML_STATUS_SUCCESS) {
      say("the host replaced this backend's abort callback without asking the backend's registry: its "
          "batches cannot be "
          "computed in waves");
      return GGML_STATUS_FAILED;
    }
    status = run_in_waves(*stopped, at);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
}

ggml_status BackendHook::compute(ggml_cgraph* graph) {
  if (!plan_.build(*graph, resolve_callback, this)) return stock_(backend_, graph);
  Session& session = Session::instance();
  session.before_graph();
  const std::shared_lock no_reconnect(session.graphs());
  ++session.counters().graphs;
  if (!assign_lanes()) return GGML_STATUS_FAILED;
  plan_.swap();
  const ggml_status status = run();
  plan_.restore();
  for (const Lane& lane : lanes_) moecached_lane_end(lane.lane);
  return status;
}

}  // namespace moecached::shim
