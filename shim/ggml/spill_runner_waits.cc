// Graphs that wait on the GPU: spill_wait_plan.h run in place of a graph that is cut.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "shim/ggml/cuda_fetch.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"
#include "shim/ggml/spill_runner.h"

namespace moecached::shim {
namespace {

// Stock loads a kernel when it first launches it, for which the driver may wait until the GPU is at rest.
constexpr uint32_t kGraphsBeforeWaits = 4;

}  // namespace

uint32_t SpillRunner::Plan::n_ids_of_token() const { return static_cast<uint32_t>(cuts.front().ids->ne[0]); }

uint32_t SpillRunner::Plan::n_ids_max() const {
  int64_t n_ids = 0;
  for (const Cut& cut : cuts) n_ids = std::max(n_ids, cut.ids->ne[0] * cut.ids->ne[1]);
  return static_cast<uint32_t>(n_ids);
}

std::vector<SpillWaitPlan::Layer> SpillRunner::Plan::waiting_layers() const {
  std::vector<SpillWaitPlan::Layer> layers;
  for (const Cut& cut : cuts)
    layers.push_back({cut.layer, cut.ids, cut.operations.front().tensor->n_experts, cut.position()});
  return layers;
}

// A layer that asks must have all layers before it behind it, which operations in more than one stream do
// not promise.
bool SpillRunner::is_wait_wanted() {
  const char* const wanted = std::getenv("MOECACHED_GPU_WAIT");
  return (wanted == nullptr || std::strcmp(wanted, "0") != 0) &&
         std::getenv("GGML_CUDA_GRAPH_OPT") == nullptr;
}

bool SpillRunner::can_wait(const Plan& plan) {
  if (!plan.may_wait || !can_fetch()) return false;
  Lane& lane = *plan.cuts.front().lane;
  if (lane.refuses_waits || ++lane.small_graphs <= kGraphsBeforeWaits) return false;
  const moecached_status status = moecached_spill_waits_reserve(lane.lane, plan.n_ids_max());
  if (status == MOECACHED_E_TOO_MANY) return false;
  if (status == MOECACHED_OK && (lane.waits.memory != nullptr || prepare_waits(lane, plan))) return true;
  if (status != MOECACHED_OK) debug("graphs are cut at each MoE layer: %s", moecached_last_error());
  lane.refuses_waits = true;
  return false;
}

// Also clears the slots: those of other windows may be none of these.
void SpillRunner::write_identity(Lane& lane) {
  const SpillWaitPlan::Memory memory = {lane.waits.memory, reinterpret_cast<uint64_t>(lane.waits.address()),
                                        0};
  memory.buffer->iface.clear(memory.buffer, 0);
  std::vector<int32_t> identity(SpillWaitPlan::kExpertsMax);
  std::iota(identity.begin(), identity.end(), 0);
  ggml_tensor table = {};
  table.type = GGML_TYPE_I32;
  table.buffer = memory.buffer;
  table.data = reinterpret_cast<void*>(memory.identity());
  memory.buffer->iface.set_tensor(memory.buffer, &table, identity.data(), 0,
                                  identity.size() * sizeof(int32_t));
}

// Memory for what waits write, and a trial: stock must copy ids in the way that we can replace.
bool SpillRunner::prepare_waits(Lane& lane, const Plan& plan) {
  if (!grow(lane.waits, SpillWaitPlan::Memory::kBytes, "waits on the GPU")) return false;
  const SpillWaitPlan::Memory memory = {lane.waits.memory, reinterpret_cast<uint64_t>(lane.waits.address()),
                                        0};
  write_identity(lane);
  ggml_tensor ids = {}, copy = {};
  ids.type = GGML_TYPE_I32;
  ids.buffer = lane.waits.memory;
  ids.data = reinterpret_cast<void*>(memory.dense(0));
  ids.nb[0] = ids.nb[1] = ids.nb[2] = ids.nb[3] = sizeof(int32_t);
  std::fill_n(ids.ne, GGML_MAX_DIMS, 1);
  copy = ids;
  copy.op = GGML_OP_CONT;
  copy.flags = GGML_TENSOR_FLAG_COMPUTE;
  copy.src[0] = &ids;
  copy.data = reinterpret_cast<void*>(memory.slots(0));
  ggml_tensor* node = &copy;
  ggml_cgraph trial = plan.graph;
  trial.nodes = &node;
  trial.n_nodes = 1;
  trial.uid = 0;
  const PlannedFetch planned = {memory.slots(0), memory.dense(0), 1, 0, 0};
  bool was_ours = false;
  const FetchScope::Enqueue look = [&](const PlannedFetch&, void*) {
    was_ours = true;
    return false;
  };
  {
    const FetchScope scope({&planned, 1}, look);
    if (stock_.graph_compute(backend_, &trial) != GGML_STATUS_SUCCESS) return false;
  }
  stock_.synchronize(backend_);
  if (!was_ours) debug("graphs are cut at each MoE layer: this llama.cpp copies ids in another way");
  return was_ours;
}

ggml_status SpillRunner::run_waiting(Plan& plan) {
  Lane& lane = *plan.cuts.front().lane;
  layers_.clear();
  for (const Cut& cut : plan.cuts) layers_.push_back(cut.layer);
  const moecached_status begun = moecached_spill_waits_begin(lane.lane, layers_.data(), layers_.size(),
                                                             plan.n_ids_max(), plan.n_ids_of_token());
  if (begun == MOECACHED_E_UNAVAILABLE || begun == MOECACHED_E_TOO_MANY) return run(plan);
  if (begun != MOECACHED_OK) {
    say("experts cannot be used: %s", moecached_last_error());
    return GGML_STATUS_FAILED;
  }
  const SpillWaitPlan::Memory memory = {lane.waits.memory, reinterpret_cast<uint64_t>(lane.waits.address()),
                                        moecached_spill_lane_generation(lane.lane)};
  if (std::exchange(lane.waits_generation, memory.generation) != memory.generation) write_identity(lane);
  bool changed = !std::exchange(plan.waited, true);
  if (!plan.waiting.is_placed(memory)) {
    plan.waiting.place(plan.graph, plan.waiting_layers(), memory, pool_);
    changed = true;
  }
  for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
    Cut& cut = plan.cuts[i];
    cut.path = Path::kNone;  // the pieces of a graph that is cut next are new to stock
    for (const Operation& operation : cut.operations) {
      operation.node->src[operation.weight_source] = &window(cut, *operation.tensor);
      operation.node->src[2] = plan.waiting.slots(i);
    }
  }
  ggml_cgraph whole = plan.waiting.graph(plan.graph);
  if (changed) whole.uid = 0;  // as in launch()
  std::size_t n_enqueued = 0;
  bool failed = false;
  // What failed is not copied either: ids are no slots. The slots of before are, or zeros.
  const FetchScope::Enqueue enqueue = [&](const PlannedFetch& planned, void* stream) {
    const moecached_spill_wait wait = {stream, planned.slots, planned.fetched, planned.n_ids, planned.layer};
    // A layer that nobody is going to answer must not wait: those before it are answered first.
    failed = failed || n_enqueued >= layers_.size() || layers_[n_enqueued] != planned.layer;
    if (failed) return true;
    ++n_enqueued;
    if (moecached_spill_wait_enqueue(lane.lane, &wait) == MOECACHED_OK) return true;
    say("no wait on the GPU: %s", moecached_last_error());
    failed = true;
    return true;
  };
  ggml_status status = GGML_STATUS_SUCCESS;
  {
    const FetchScope scope(plan.waiting.waits(), enqueue);
    status = stock_.graph_compute(backend_, &whole);
  }
  stock_.synchronize(backend_);
  if (moecached_spill_waits_end(lane.lane) != MOECACHED_OK) {
    say("experts cannot be used: %s", moecached_last_error());
    status = GGML_STATUS_FAILED;
  }
  if (status == GGML_STATUS_SUCCESS) Session::instance().counters().gpu_waits += plan.cuts.size();
  // None: stock launched what it had captured.
  if (failed || (n_enqueued != 0 && n_enqueued != plan.cuts.size())) {
    lane.refuses_waits = true;
    status = GGML_STATUS_FAILED;
  }
  if (status != GGML_STATUS_SUCCESS) plan.waiting.clear();
  return status;
}

}  // namespace moecached::shim
