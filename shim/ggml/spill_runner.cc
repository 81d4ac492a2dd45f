#include "shim/ggml/spill_runner.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <utility>

#include "shim/ggml/foreign_buffer.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {
namespace {

constexpr std::size_t kPlans = 32;
constexpr int64_t kIdsMax = 128;  // of one layer, in slots
constexpr std::size_t kSlotsPitch = kIdsMax * sizeof(int32_t);
constexpr std::size_t kReadPast = 4096;  // what kernels may read past the last expert

const ServedTensor* spilled(const ggml_tensor& node, int source) {
  if (source < 0 || (node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || !is_in_weight_buffer(node.src[source]))
    return nullptr;
  const ServedTensor* served = served_tensor(node.src[source]);
  return served != nullptr && served->spill != nullptr ? served : nullptr;
}

}  // namespace

bool SpillRunner::is_for(const ggml_cgraph& graph) {
  for (int i = 0; i < graph.n_nodes; ++i) {
    if (spilled(*graph.nodes[i], weight_source_of(*graph.nodes[i])) != nullptr) return true;
  }
  return false;
}

SpillRunner::~SpillRunner() {
  if (lanes_.empty()) return;
  stock_.synchronize(backend_);
  for (const std::unique_ptr<Lane>& lane : lanes_) free_lane(*lane);
}

void SpillRunner::free_lane(Lane& lane) {
  if (lane.lane != nullptr) moecached_spill_lane_close(lane.lane);
  if (lane.ready != nullptr) backend_->device->iface.event_free(backend_->device, lane.ready);
  if (lane.foreign != nullptr) host().ggml_backend_buffer_free(lane.foreign);
  if (lane.slots.memory != nullptr) host().ggml_backend_buffer_free(lane.slots.memory);
  if (lane.waits.memory != nullptr) host().ggml_backend_buffer_free(lane.waits.memory);
  for (const Buffer& part : lane.parts) {
    if (part.memory != nullptr) host().ggml_backend_buffer_free(part.memory);
  }
}

SpillRunner::Lane* SpillRunner::lane_of(const ServedTensor& served) {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->experts == served.spill) return lane.get();
  }
  const ggml_backend_dev_t device = backend_->device;
  const char* const name = device->iface.get_name(device);
  auto lane = std::make_unique<Lane>();
  lane->experts = served.spill;
  std::string error;
  lane->model = served.spill->on(device, error);
  if (lane->model == nullptr) {
    say("no experts on %s: %s", name, error.c_str());
    return nullptr;
  }
  lane->ready = device->iface.event_new(device);
  lane->foreign = make_foreign_buffer(device);
  lane->refuses_waits = !is_wait_wanted();
  const bool has_slots = grow(lane->slots, SpillWaitPlan::kLayersMax * kSlotsPitch, "expert slots");
  if (lane->ready == nullptr)
    say("no experts on %s: this build of llama.cpp makes no CUDA events (GGML_CUDA_NO_PEER_COPY)", name);
  if (lane->ready == nullptr || !has_slots) {
    free_lane(*lane);
    return nullptr;
  }
  if (moecached_spill_lane_open(lane->model->handle(), &lane->lane) != MOECACHED_OK) {
    lane->lane = nullptr;
    say("no lane for this context: %s", moecached_last_error());
    free_lane(*lane);
    return nullptr;
  }
  lanes_.push_back(std::move(lane));
  return lanes_.back().get();
}

bool SpillRunner::grow(Buffer& buffer, std::size_t bytes, const char* what) {
  if (buffer.bytes >= bytes) return true;
  const ggml_backend_dev_t device = backend_->device;
  if (buffer.memory != nullptr) {
    stock_.synchronize(backend_);
    host().ggml_backend_buffer_free(buffer.memory);
    buffer = {};
    // Graphs that stock has captured may have the old address, whichever plan they are of.
    for (const std::unique_ptr<Plan>& plan : plans_) {
      for (Cut& cut : plan->cuts) cut.path = Path::kNone;
    }
  }
  buffer.memory = host().ggml_backend_buft_alloc_buffer(device->iface.get_buffer_type(device), bytes);
  if (buffer.memory == nullptr) {
    say("no %zu bytes on %s for %s: raise gpu.keep_free of the daemon, or lower gpu.slots", bytes,
        device->iface.get_name(device), what);
    return false;
  }
  buffer.bytes = bytes;
  buffer.memory->iface.clear(buffer.memory, 0);
  return true;
}

SpillRunner::Plan* SpillRunner::plan_of(const ggml_cgraph& graph) {
  Plan* found = &unnamed_;
  if (graph.uid != 0) {
    Plan* oldest = nullptr;
    for (const std::unique_ptr<Plan>& plan : plans_) {
      if (plan->graph.uid == graph.uid && plan->graph.nodes == graph.nodes &&
          plan->graph.n_nodes == graph.n_nodes) {
        plan->used = ++now_;
        return plan.get();
      }
      if (oldest == nullptr || plan->used < oldest->used) oldest = plan.get();
    }
    if (plans_.size() < kPlans) {
      plans_.push_back(std::make_unique<Plan>());
      oldest = plans_.back().get();
    }
    found = oldest;
  }
  ++Session::instance().counters().gpu_plans;
  found->used = ++now_;
  if (find(*found, graph)) return found;
  found->graph = {};  // half of a plan is none
  return nullptr;
}

bool SpillRunner::find(Plan& plan, const ggml_cgraph& graph) {
  plan.graph = graph;
  plan.cuts.clear();
  plan.waiting.clear();
  plan.waited = false;
  for (int i = 0; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    const int source = weight_source_of(*node);
    const ServedTensor* served = spilled(*node, source);
    if (served == nullptr) {
      if (source < 0 || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 ||
          !is_in_weight_buffer(node->src[source]))
        continue;
      say("%s is not of the model that this graph computes with, which spills", node->src[source]->name);
      return false;
    }
    ggml_tensor* ids = node->src[2];
    // A batch of which no output is wanted: stock skips operations on nothing, and looks at no source.
    if (ids->ne[0] == 0 || ids->ne[1] == 0) continue;
    Lane* lane = lane_of(*served);
    if (lane == nullptr) return false;
    const GpuTensor* tensor = served->spill->tensor(served->spill_index);
    if (plan.cuts.empty() || plan.cuts.back().ids != ids || plan.cuts.back().layer != tensor->layer ||
        plan.cuts.back().lane != lane) {
      plan.cuts.push_back({.lane = lane, .layer = tensor->layer, .ids = ids, .operations = {}});
    }
    plan.cuts.back().operations.push_back({node, source, node->src[source], ids, tensor, i});
  }
  bool is_one = true;
  for (const Cut& cut : plan.cuts) {
    is_one = is_one && cut.lane == plan.cuts.front().lane && cut.ids->ne[0] == plan.cuts.front().ids->ne[0];
  }
  plan.may_wait = is_one && SpillWaitPlan::is_possible(plan.waiting_layers());
  return true;
}

ggml_status SpillRunner::launch(const Plan& plan, int first, int last, bool changed) {
  if (first >= last) return GGML_STATUS_SUCCESS;
  ggml_cgraph piece = plan.graph;
  piece.nodes = plan.graph.nodes + first;
  piece.n_nodes = last - first;
  // Stock takes an equal number for an equal graph and launches what it captured. Without one it compares the
  // nodes.
  if (changed) piece.uid = 0;
  return stock_.graph_compute(backend_, &piece);
}

// Waits for the GPU. The ids of a row are dense, rows are not: they are a view of a sorted list of all
// experts.
bool SpillRunner::read_ids(const ggml_tensor& ids) {
  if (ids.type != GGML_TYPE_I32 || ids.nb[0] != sizeof(int32_t)) return false;
  const std::size_t bytes = static_cast<std::size_t>(ids.ne[1] - 1) * ids.nb[1] +
                            static_cast<std::size_t>(ids.ne[0]) * sizeof(int32_t);
  ids_.resize(bytes);
  stock_.get_tensor_async(backend_, &ids, ids_.data(), 0, bytes);
  stock_.synchronize(backend_);
  return true;
}

// The tensor in place of the expert tensor in slots; changed when the windows have moved.
ggml_tensor& SpillRunner::window(Cut& cut, const GpuTensor& tensor) {
  ggml_tensor& window = cut.lane->windows[&tensor];
  uint64_t address = 0;
  uint32_t n_slots = 0;
  moecached_spill_lane_window(cut.lane->lane, tensor.layer, tensor.part, &address, &n_slots);
  const int slots_dimension = tensor.is_bias ? 1 : 2;
  if (window.data == reinterpret_cast<void*>(address) && window.ne[slots_dimension] == n_slots) return window;
  window = tensor.shape;
  window.view_src = nullptr;
  window.buffer = cut.lane->foreign;
  window.data = reinterpret_cast<void*>(address);
  set_slots(window, tensor.is_bias, n_slots, tensor.info.expert_bytes);
  return window;
}

void SpillRunner::note(Cut& cut, Path path) {
  const uint64_t generation = moecached_spill_lane_generation(cut.lane->lane);
  cut.changed = cut.path != path || cut.generation != generation;
  cut.path = path;
  cut.generation = generation;
}

// Resolves the ids that were read, and points the layer's operations at slots. False: *too_many, or it
// failed.
bool SpillRunner::place_slots(Cut& cut, bool* too_many) {
  const int64_t columns = cut.ids->ne[0], rows = cut.ids->ne[1];
  Lane& lane = *cut.lane;
  slots_.resize(static_cast<std::size_t>(columns * rows));
  const uint64_t address = reinterpret_cast<uint64_t>(lane.slots.address()) + cut.layer * kSlotsPitch;
  const moecached_spill_target target = {address, lane.ready->context};
  const moecached_status status = moecached_spill_resolve(
      lane.lane, cut.layer, reinterpret_cast<const int32_t*>(ids_.data()), static_cast<std::size_t>(rows),
      static_cast<std::size_t>(columns), cut.ids->nb[1], slots_.data(), &target);
  *too_many = status == MOECACHED_E_TOO_MANY;
  if (status != MOECACHED_OK) {
    if (!*too_many) say("experts cannot be used: %s", moecached_last_error());
    return false;
  }
  stock_.event_wait(backend_, lane.ready);
  ggml_tensor& ids = lane.ids[{cut.layer, columns, rows}];
  if (ids.data == nullptr) {
    ids.type = GGML_TYPE_I32;
    ids.op = GGML_OP_NONE;
    ids.buffer = lane.slots.memory;
    ids.data = reinterpret_cast<void*>(address);
    const int64_t shape[GGML_MAX_DIMS] = {columns, rows, 1, 1};
    std::size_t stride = sizeof(int32_t);
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
      ids.ne[i] = shape[i];
      ids.nb[i] = stride;
      stride *= static_cast<std::size_t>(shape[i]);
    }
    std::snprintf(ids.name, sizeof ids.name, "moecache_slots-%u", cut.layer);
  }
  for (const Operation& operation : cut.operations) {
    operation.node->src[operation.weight_source] = &window(cut, *operation.tensor);
    operation.node->src[2] = &ids;
  }
  return true;
}

// Copies the operation's part of all experts that the batch uses to where the file has them.
bool SpillRunner::load_whole(Cut& cut, Operation& operation) {
  Lane& lane = *cut.lane;
  const GpuTensor& tensor = *operation.tensor;
  if (lane.parts.size() <= tensor.part) lane.parts.resize(tensor.part + 1);
  Buffer& buffer = lane.parts[tensor.part];
  const std::size_t bytes = static_cast<std::size_t>(tensor.n_experts) * tensor.info.expert_bytes;
  if (!grow(buffer, bytes + kReadPast, "the experts of a layer")) return false;
  const auto address = reinterpret_cast<uint64_t>(buffer.address());
  if (moecached_spill_load_part(lane.lane, tensor.part, address, lane.ready->context) != MOECACHED_OK) {
    say("experts of %s cannot be read: %s", tensor.info.name, moecached_last_error());
    return false;
  }
  stock_.event_wait(backend_, lane.ready);
  ggml_tensor& whole = lane.wholes[&tensor];
  if (whole.data != buffer.address()) {
    whole = tensor.shape;
    whole.view_src = nullptr;
    whole.buffer = lane.foreign;
    whole.data = buffer.address();
    cut.changed = true;
  }
  operation.node->src[operation.weight_source] = &whole;
  return true;
}

// From the layer's first expert operation to its last.
ggml_status SpillRunner::run_whole(const Plan& plan, Cut& cut) {
  const int64_t n_experts = cut.operations.front().tensor->n_experts;
  std::vector<bool> used(static_cast<std::size_t>(n_experts));
  for (int64_t row = 0; row < cut.ids->ne[1]; ++row) {
    const char* const at = ids_.data() + static_cast<std::size_t>(row) * cut.ids->nb[1];
    for (int64_t column = 0; column < cut.ids->ne[0]; ++column) {
      int32_t id = 0;
      std::memcpy(&id, at + static_cast<std::size_t>(column) * sizeof id, sizeof id);
      if (id < 0 || id >= n_experts) {
        say("layer %u: an expert id is out of range", cut.layer);
        return GGML_STATUS_FAILED;
      }
      used[static_cast<std::size_t>(id)] = true;
    }
  }
  experts_.clear();
  for (int32_t e = 0; e < n_experts; ++e) {
    if (used[static_cast<std::size_t>(e)]) experts_.push_back(e);
  }
  if (moecached_spill_begin_layer(cut.lane->lane, cut.layer, experts_.data(), experts_.size()) !=
      MOECACHED_OK) {
    say("experts cannot be used: %s", moecached_last_error());
    return GGML_STATUS_FAILED;
  }
  ++Session::instance().counters().cut_layers;
  note(cut, Path::kWhole);
  // A few tokens are computed by fused kernels, which take gate and up at once.
  const bool at_once = cut.ids->ne[1] <= kVectorTokens;
  int at = cut.position();
  for (Operation& operation : cut.operations) {
    if (!load_whole(cut, operation)) return GGML_STATUS_FAILED;
    if (at_once) continue;
    const ggml_status status = launch(plan, at, operation.position + 1, cut.changed);
    if (status != GGML_STATUS_SUCCESS) return status;
    at = operation.position + 1;
  }
  return launch(plan, at, cut.operations.back().position + 1, cut.changed);
}

ggml_status SpillRunner::run(Plan& plan) {
  int at = 0;
  // Of the piece that begins at `at`. The first one begins where the whole graph does, and has its number.
  bool changed = std::exchange(plan.waited, false);
  for (Cut& cut : plan.cuts) {
    ggml_status status = launch(plan, at, cut.position(), changed);
    if (status != GGML_STATUS_SUCCESS) return status;
    at = cut.position();
    if (!read_ids(*cut.ids)) {
      say("%s: expert ids of another layout than this plugin knows", cut.ids->name);
      return GGML_STATUS_FAILED;
    }
    bool too_many = cut.ids->ne[1] > kVectorTokens || cut.ids->ne[0] * cut.ids->ne[1] > kIdsMax;
    if (!too_many && place_slots(cut, &too_many)) {
      note(cut, Path::kSlots);
      changed = cut.changed;
      continue;
    }
    if (!too_many) return GGML_STATUS_FAILED;
    status = run_whole(plan, cut);
    if (status != GGML_STATUS_SUCCESS) return status;
    at = cut.operations.back().position + 1;
    changed = cut.changed;
  }
  return launch(plan, at, plan.graph.n_nodes, changed);
}

ggml_status SpillRunner::compute(ggml_cgraph& graph) {
  Plan* const plan = plan_of(graph);
  if (plan == nullptr) return GGML_STATUS_FAILED;
  Session& session = Session::instance();
  session.before_graph();
  const std::shared_lock no_reconnect(session.graphs());
  ++session.counters().graphs;
  const ggml_status status = can_wait(*plan) ? run_waiting(*plan) : run(*plan);
  for (Cut& cut : plan->cuts) {
    if (status != GGML_STATUS_SUCCESS) cut.path = Path::kNone;  // what was noted may not have been launched
    for (const Operation& operation : cut.operations) {
      operation.node->src[operation.weight_source] = operation.weight;
      operation.node->src[2] = operation.ids;
    }
  }
  // The last layer's experts are given up when it is computed. Also after a failure: what was begun must end,
  // or their slots are never used for others.
  stock_.synchronize(backend_);
  for (const std::unique_ptr<Lane>& lane : lanes_) moecached_spill_end(lane->lane);
  return status;
}

}  // namespace moecached::shim
