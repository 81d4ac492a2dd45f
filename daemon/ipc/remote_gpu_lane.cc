#include "daemon/ipc/remote_gpu_lane.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "daemon/ipc/gpu_service.h"
#include "daemon/ipc/route_buffer.h"
#include "daemon/platform/futex.h"

namespace moecached {
namespace {

constexpr std::uint64_t kWaitSliceNs = 20'000'000;

std::vector<LayerLimits> limits_of(const ModelLayout& layout) {
  std::vector<LayerLimits> limits;
  for (const LayerLayout& layer : layout.layers)
    limits.push_back({layer.n_experts, static_cast<std::uint32_t>(layer.parts.size())});
  return limits;
}

// Of a client that may still be reading: to free memory that another process has open is undefined in CUDA,
// to end the process that made it is not.
void keep_until_exit(std::unique_ptr<GpuIpcBuffer> buffer) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<GpuIpcBuffer>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(buffer));
}

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

Result<std::unique_ptr<RouteLane>> RemoteGpuLane::open(Core& core, const Options& options,
                                                       std::shared_ptr<GpuModel> model,
                                                       const RouteOpen& open) {
  auto segment = RouteSegment::map(model->segment_fd(), model->segment_bytes());
  if (!segment) return std::move(segment).error();
  auto made = make_log_segment(*model);
  if (!made) return std::move(made).error();
  auto session = RemoteSession::add(core, options.boot_epoch, open.label);
  if (!session) return std::move(session).error();
  // It reads no peer's slots, and so cannot be the process that keeps the others from it.
  auto log = core.call([&](Core& loop) {
    return loop.open_gpu_in_session(
        (*session)->id(),
        {.model = model, .log = *std::move(made), .reads_peers = true, .no_peers_reason = {}});
  });
  if (!log) return std::move(log).error();
  std::unique_ptr<RemoteGpuLane> lane(
      new RemoteGpuLane(*std::move(session), std::move(model), *std::move(segment), *std::move(log)));
  lane->geometry_ = lane->segment_.describe(options.boot_epoch);
  if (Status shared = lane->share_buffer(options, open.experts); !shared) return std::move(shared).error();
  return std::unique_ptr<RouteLane>(std::move(lane));
}

RemoteGpuLane::RemoteGpuLane(std::unique_ptr<RemoteSession> session, std::shared_ptr<GpuModel> model,
                             RouteSegment segment, std::shared_ptr<Memfd> log)
    : session_(std::move(session)),
      model_(std::move(model)),
      segment_(std::move(segment)),
      log_(std::move(log)),
      limits_(limits_of(model_->layout())),
      lane_(session_->session(), model_->id().value),
      ids_(limits_),
      place_of_(segment_.n_experts_max()) {}

RemoteGpuLane::~RemoteGpuLane() {
  if (session_->is_left_open()) {
    keep_until_exit(std::move(buffer_));
  } else {
    lane_.close();
  }
}

Status RemoteGpuLane::share_buffer(const Options& options, std::uint32_t experts) {
  Gpu& gpu = model_->gpu();
  const Result<std::uint64_t> bytes = plan_route_buffer(experts, gpu.granularity(), &geometry_);
  if (!bytes) return Fault(bytes.error());
  const Result<GpuMemoryInfo> memory = gpu.memory_info();
  if (!memory) return Fault(memory.error());
  if (memory->free < *bytes || memory->free - *bytes < options.keep_free) {
    return Fault{FaultCode::kLimit, "a stream needs " + mib(*bytes) + " of device memory, " +
                                        mib(memory->free) +
                                        " are free and gpu.keep_free = " + mib(options.keep_free) +
                                        ": lower one of the two, or ask for fewer experts"};
  }
  auto buffer = gpu.create_ipc_buffer(*bytes);
  if (!buffer) return std::move(buffer).error();
  buffer_ = *std::move(buffer);
  const auto handle = buffer_->handle();
  geometry_.cuda = {.handle = {reinterpret_cast<const char*>(handle.data()), handle.size()},
                    .bytes = *bytes,
                    .uuid = to_string(gpu.id())};
  return ok();
}

Status RemoteGpuLane::decide(const RouteDecision& decision, const std::function<bool()>& gone,
                             RouteAnswer* out) {
  if (Status taken = ids_.take(decision); !taken) return taken;
  const std::size_t n_distinct = ids_.distinct().size();
  const std::uint32_t n_records = geometry_.layers[decision.layer].n_slots;
  if (n_distinct > n_records) {
    return Fault{FaultCode::kLimit,
                 std::to_string(n_distinct) + " distinct experts, this stream has room for " +
                     std::to_string(n_records) + ": send fewer tokens at once, or open it for more experts"};
  }
  if (Status begun = begin(gone); !begun) return begun;
  const Result<std::uint32_t> from_ram = copy(decision);
  if (from_ram) log(decision);
  lane_.complete();
  if (!from_ram) return Fault(from_ram.error());
  out->n_distinct = static_cast<std::uint32_t>(n_distinct);
  out->n_absent = *from_ram;
  out->changed.clear();  // the table names slots that this client cannot reach
  out->has_more = false;
  out->slots.clear();
  for (const std::uint32_t expert : decision.experts) out->slots.push_back(place_of_[expert].record);
  lane_.count_lookups(decision.experts.size());
  return ok();
}

// Begins an epoch of a model that is loaded. The state is looked at within it: a GPU that is lost meanwhile
// is known to be so before the next epoch.
Status RemoteGpuLane::begin(const std::function<bool()>& gone) {
  const std::uint32_t* const word = &model_->log_geometry().load_state;
  for (;;) {
    lane_.begin(MOECACHED_LAYER_ALL);
    const std::uint32_t state = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (state == MOECACHED_COVERED) return ok();
    lane_.complete();
    if (state == MOECACHED_GPU_LOST)
      return Fault{FaultCode::kSystem, "the daemon has lost this GPU; its log says why"};
    if (state != MOECACHED_LOADING)
      return Fault{FaultCode::kSystem,
                   "the model's file could not be read into RAM; the daemon's log says why"};
    if (gone()) return Fault{FaultCode::kNotFound, "the stream has ended"};
    (void)futex_wait(word, state, kWaitSliceNs);
  }
}

// Returns how many experts came from RAM.
Result<std::uint32_t> RemoteGpuLane::copy(const RouteDecision& decision) {
  const LayerIndex layer(decision.layer);
  const RouteLayer& records = geometry_.layers[decision.layer];
  copies_.clear();
  std::uint32_t n_from_ram = 0, record = 0;
  for (const std::uint16_t id : ids_.distinct()) {
    const ExpertIndex expert(id);
    const std::int32_t entry = segment_.entry(decision.layer, id);
    const bool on_device = model_->is_own_slot(layer, entry);
    place_of_[id] = {.read_from = on_device ? entry : model_->host_entry(layer, expert), .record = record};
    for (std::size_t p = 0; p < records.parts.size(); ++p) {
      copies_.push_back({.offset = record * records.slot_stride + records.parts[p].slot_offset,
                         .source = on_device ? model_->slot_address(layer, p, entry)
                                             : model_->host_address(layer, p, expert),
                         .bytes = records.parts[p].expert_bytes,
                         .from_device = on_device});
    }
    n_from_ram += on_device ? 0 : 1;
    ++record;
  }
  if (Status copied = buffer_->copy(copies_); !copied) return std::move(copied).error();
  return n_from_ram;
}

// As GpuLane::log of the client library: what was read from where, so that the policy learns. Where a token
// names not as many experts as the model uses there is no row for it.
void RemoteGpuLane::log(const RouteDecision& decision) {
  const moecached_shm_gpu& words = model_->log_geometry();
  moecached_shm_lane& lane = session_->session().lane(0);
  const std::uint32_t n_tokens = std::max(decision.n_tokens, 1u), k = geometry_.n_expert_used;
  if (decision.experts.size() != std::size_t{n_tokens} * k) return;
  const std::uint64_t epoch = lane_.epoch();
  const std::uint64_t drained = std::atomic_ref(lane.tail).load(std::memory_order_acquire);
  if (epoch > words.log_entries && drained < epoch - words.log_entries) {
    std::atomic_ref(lane.dropped).fetch_add(1, std::memory_order_relaxed);
    return;
  }
  std::byte* const entry = log_->bytes().data() + epoch % words.log_entries * words.log_entry_bytes;
  const std::uint32_t n_logged = std::min<std::uint32_t>(n_tokens, MOECACHED_LOG_TOKENS);
  moecached_shm_log_entry header{};
  header.epoch = epoch;
  header.n_layers = 1;
  header.n_tokens = n_logged;
  header.n_tokens_all = n_tokens;
  header.flags = decision.prefill ? MOECACHED_FLAG_PREFILL : 0;
  std::memcpy(entry, &header, sizeof header);
  const auto row_layer = static_cast<std::uint16_t>(decision.layer);
  std::memcpy(entry + sizeof header, &row_layer, sizeof row_layer);
  std::byte* slot = entry + words.log_slots_offset;
  for (const std::uint32_t expert : decision.experts.last(std::size_t{n_logged} * k)) {
    std::memcpy(slot, &place_of_[expert].read_from, sizeof(std::int32_t));
    slot += sizeof(std::int32_t);
  }
}

}  // namespace moecached
