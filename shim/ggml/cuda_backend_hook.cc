#include "shim/ggml/cuda_backend_hook.h"

#include <algorithm>
#include <shared_mutex>
#include <string>

#include "shim/ggml/cuda_fetch.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {
namespace {

constexpr std::size_t kPlans = 32;
// More tokens than stock's matrix-vector kernels take at once, and than a speculative batch usually has.
constexpr uint32_t kDecodeTokens = 8;
// Graphs of a few tokens before scratch slots are asked for: warm-ups are over by then, the host has
// allocated what it needs, and where everything fits into device memory it is there.
constexpr uint32_t kGraphsBeforeScratch = 16;

}  // namespace

CudaBackendHook::~CudaBackendHook() {
  stock_.synchronize(backend_);
  for (const std::unique_ptr<Lane>& lane : lanes_) free_lane(*lane);
}

void CudaBackendHook::free_lane(Lane& lane) {
  const ggml_backend_dev_t device = backend_->device;
  if (lane.lane != nullptr) moecached_gpu_lane_close(lane.lane);  // waits for the log, which reads the slots
  if (lane.done != nullptr) device->iface.event_free(device, lane.done);
  if (lane.logged != nullptr) device->iface.event_free(device, lane.logged);
  if (lane.slots.buffer != nullptr) host().ggml_backend_buffer_free(lane.slots.buffer);
}

CudaBackendHook::Lane* CudaBackendHook::lane_of(const ServedTensor& served) {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->experts == served.gpu) return lane.get();
  }
  const ggml_backend_dev_t device = backend_->device;
  auto lane = std::make_unique<Lane>();
  lane->experts = served.gpu;
  std::string error;
  lane->model = served.gpu->on(device, error);
  if (lane->model == nullptr) {
    say("no experts on %s: %s", device->iface.get_name(device), error.c_str());
    return nullptr;
  }
  lane->done = device->iface.event_new(device);
  lane->logged = device->iface.event_new(device);
  if (lane->done == nullptr || lane->logged == nullptr) {
    say("no experts on %s: this build of llama.cpp makes no CUDA events (GGML_CUDA_NO_PEER_COPY)",
        device->iface.get_name(device));
    free_lane(*lane);
    return nullptr;
  }
  if (moecached_gpu_lane_open(lane->model->handle(), &lane->lane) != MOECACHED_OK) {
    lane->lane = nullptr;
    say("no lane for this context: %s", moecached_last_error());
    free_lane(*lane);
    return nullptr;
  }
  lane->windows = lane->experts->windows(*lane->model);
  lanes_.push_back(std::move(lane));
  return lanes_.back().get();
}

CudaBackendHook::Lane& CudaBackendHook::lane_of(const CudaPlan::Share& share) {
  return **std::find_if(lanes_.begin(), lanes_.end(),
                        [&](const std::unique_ptr<Lane>& lane) { return lane->model.get() == share.model; });
}

const GpuWindow* CudaBackendHook::window_of(const ggml_tensor& weight) {
  if (find_failed_ || !is_in_weight_buffer(&weight)) return nullptr;
  const ServedTensor* served = served_tensor(&weight);
  find_failed_ = true;
  if (served == nullptr || served->gpu == nullptr || weight.view_src != nullptr) {
    // supports_op has refused it, so the host did not ask. The kernel would read the reservation.
    say("%s is not served on a GPU, and a graph wants it there", weight.name);
    return nullptr;
  }
  Lane* lane = lane_of(*served);
  if (lane == nullptr || served->gpu_index >= lane->windows->size()) return nullptr;
  find_failed_ = false;
  return lane->windows->window(served->gpu_index);
}

// Takes windows that moved. True when some did.
bool CudaBackendHook::refresh() {
  bool moved = false;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->windows->generation() == lane->model->generation()) continue;
    lane->windows = lane->experts->windows(*lane->model);
    moved = true;
  }
  return moved;
}

bool CudaBackendHook::is_current(const CachedPlan& cached) const {
  // The plan keeps its windows alive, so equal pointers are the same windows.
  return std::all_of(cached.windows.begin(), cached.windows.end(), [&](const auto& windows) {
    return std::any_of(lanes_.begin(), lanes_.end(),
                       [&](const auto& lane) { return lane->windows == windows; });
  });
}

CudaBackendHook::CachedPlan& CudaBackendHook::cached_for(const ggml_cgraph& graph) {
  if (graph.uid == 0) return unnamed_;
  CachedPlan* oldest = nullptr;
  for (const std::unique_ptr<CachedPlan>& cached : plans_) {
    if (cached->plan.uid() == graph.uid) return *cached;
    if (oldest == nullptr || cached->used < oldest->used) oldest = cached.get();
  }
  if (plans_.size() < kPlans) {
    plans_.push_back(std::make_unique<CachedPlan>());
    oldest = plans_.back().get();
  }
  return *oldest;
}

bool CudaBackendHook::find(CachedPlan& cached, const ggml_cgraph& graph) {
  ++Session::instance().counters().gpu_plans;
  // Before, never on the way: all operations of a plan point into the same windows. Tensors of a graph have
  // been loaded before it.
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->windows = lane->experts->windows(*lane->model);
  find_failed_ = false;
  cached.is_found = false;
  cached.plan.find(graph, [this](const ggml_tensor& weight) { return window_of(weight); });
  cached.windows.clear();
  if (find_failed_) return false;
  for (const CudaPlan::Share& share : cached.plan.shares()) cached.windows.push_back(lane_of(share).windows);
  cached.is_found = true;
  return true;
}

bool CudaBackendHook::grow(Lane& lane, std::size_t bytes) {
  if (lane.slots.bytes >= bytes) return true;
  const ggml_backend_dev_t device = backend_->device;
  if (lane.slots.buffer != nullptr) {
    // The GPU may still write the old slots, and the log read them.
    stock_.synchronize(backend_);
    device->iface.event_synchronize(device, lane.logged);
    host().ggml_backend_buffer_free(lane.slots.buffer);
    lane.slots.address = lane.slots.bytes = 0;
    lane.slots.buffer = nullptr;
  }
  ggml_backend_buffer_t buffer =
      host().ggml_backend_buft_alloc_buffer(device->iface.get_buffer_type(device), bytes);
  if (buffer == nullptr) {
    say("no %zu bytes on %s for expert slots", bytes, device->iface.get_name(device));
    return false;
  }
  lane.slots.address = reinterpret_cast<uint64_t>(buffer->iface.get_base(buffer));
  lane.slots.bytes = bytes;
  lane.slots.buffer = buffer;
  return true;
}

// Scratch slots move the generation when they are made, so the next graph takes the windows anew and uses
// them.
void CudaBackendHook::ask_for_scratch(Lane& lane, const CudaPlan::Share& share) {
  if (!can_fetch() || share.n_fetchable == 0 || ++lane.small_graphs <= kGraphsBeforeScratch) return;
  if (lane.scratch_generation == lane.model->generation()) return;
  uint32_t n_slots = 0;
  if (moecached_gpu_lane_scratch(lane.lane, &n_slots) != MOECACHED_OK)
    debug("no scratch slots: %s", moecached_last_error());
  lane.scratch_generation = lane.model->generation();
  lane.slots.n_scratch = n_slots;
  lane.slots.generation = lane.scratch_generation;
}

bool CudaBackendHook::place(CudaPlan& plan) {
  memory_.clear();
  for (const CudaPlan::Share& share : plan.shares()) {
    Lane& lane = lane_of(share);
    if (share.slots_bytes() > 0 && !grow(lane, share.slots_bytes())) return false;
    memory_.push_back(lane.slots);
    // What was got for other windows than these is gone.
    if (lane.slots.generation != lane.windows->generation()) memory_.back().n_scratch = 0;
    if (memory_.back().n_scratch == 0) memory_.back().generation = 0;
  }
  if (!plan.is_placed(memory_)) plan.place(memory_, pool_);
  return true;
}

void CudaBackendHook::submit(Lane& lane, const CudaPlan::Share* share) {
  moecached_gpu_submit submit = {};
  submit.done_event = lane.done->context;
  submit.logged_event = lane.logged->context;
  // Without a share, or in a warm-up that asks for all experts: the epoch ends, and there is nothing to
  // learn.
  if (share != nullptr && !share->whole_layers.empty()) {
    submit.whole_layers = share->whole_layers.data();
    submit.n_whole_layers = static_cast<uint32_t>(share->whole_layers.size());
    submit.n_tokens = share->n_whole_tokens;
    submit.is_prefill = share->n_whole_tokens > kDecodeTokens ? 1 : 0;
  }
  if (share != nullptr && !share->layers.empty()) {
    submit.slots = lane.slots.address;
    submit.layer_pitch_bytes = share->pitch_bytes;
    submit.layers = share->layers.data();
    submit.n_layers = static_cast<uint32_t>(share->layers.size());
    submit.n_tokens = share->n_tokens;
    submit.is_prefill = share->n_tokens > kDecodeTokens ? 1 : 0;
  }
  if (moecached_gpu_lane_submit(lane.lane, &submit) != MOECACHED_OK) {
    say("the end of a graph could not be told: %s", moecached_last_error());
  }
}

// Begins an epoch in each lane of the plan. begun_: those where it did.
bool CudaBackendHook::begin(const CudaPlan& plan) {
  begun_.clear();
  for (const CudaPlan::Share& share : plan.shares()) {
    Lane& lane = lane_of(share);
    if (moecached_gpu_lane_begin(lane.lane) != MOECACHED_OK) {
      say("experts cannot be used: %s", moecached_last_error());
      return false;
    }
    begun_.push_back(&lane);
  }
  return true;
}

ggml_status CudaBackendHook::run(CachedPlan& cached, const ggml_cgraph& graph) {
  CudaPlan& plan = cached.plan;
  // A begin may map memory or hear that a layer is wholly resident now; the epoch has begun all the same.
  if (refresh() && !find(cached, graph)) return GGML_STATUS_FAILED;
  if (!place(plan)) return GGML_STATUS_ALLOC_FAILED;
  for (const Lane* lane : begun_) stock_.event_wait(backend_, lane->logged);
  plan.swap();
  ggml_cgraph rewritten = plan.graph(graph);
  const FetchScope::Enqueue fetch = [&](const PlannedFetch& planned, void* stream) {
    return fetch_on(lane_of(plan.shares()[planned.share]).lane, planned, stream);
  };
  ggml_status status = GGML_STATUS_SUCCESS;
  {
    const FetchScope scope(plan.fetches(), fetch);
    status = stock_.graph_compute(backend_, &rewritten);
  }
  plan.restore();
  return status;
}

ggml_status CudaBackendHook::compute(ggml_cgraph* graph) {
  GraphCounters& counters = Session::instance().counters();
  ++counters.gpu_computes;
  if (Session::instance().has_spilled() && SpillRunner::is_for(*graph)) return spill_.compute(*graph);
  CachedPlan& cached = cached_for(*graph);
  cached.used = ++now_;
  const bool is_known =
      graph->uid != 0 && cached.is_found && cached.plan.is_for(*graph) && is_current(cached);
  if (!is_known && !find(cached, *graph)) return GGML_STATUS_FAILED;
  if (cached.plan.empty()) return stock_.graph_compute(backend_, graph);
  Session& session = Session::instance();
  session.before_graph();
  const std::shared_lock no_reconnect(session.graphs());
  ++counters.graphs;
  const bool begun = begin(cached.plan);
  const ggml_status status = begun ? run(cached, *graph) : GGML_STATUS_FAILED;
  // Also after a failure: an epoch that began must end, or no slot of the model is ever reused.
  for (Lane* lane : begun_) {
    const auto& shares = cached.plan.shares();
    const auto share = std::find_if(shares.begin(), shares.end(), [&](const CudaPlan::Share& candidate) {
      return candidate.model == lane->model.get();
    });
    stock_.event_record(backend_, lane->done);
    const bool done = status == GGML_STATUS_SUCCESS && share != shares.end();
    submit(*lane, done ? &*share : nullptr);
    if (done) ask_for_scratch(*lane, *share);
  }
  return status;
}

}  // namespace moecached::shim
