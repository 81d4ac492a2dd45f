// What the core loop tells the control plane.
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "daemon/config/tier_string.h"
#include "daemon/ipc/core.h"
#include "daemon/platform/clock.h"

namespace moecached {

namespace {
std::uint64_t load(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_relaxed); }
}  // namespace

bool Core::is_stalled(const Lane& lane) {
  const std::uint64_t begun = load(lane.words->begun);
  return lane.stalled_since_ns != 0 && lane.stalled_begun == begun &&
         load(lane.words->completed) < begun >> 16 && monotonic_ns() - lane.stalled_since_ns > kStallAfterNs;
}

std::vector<ModelReport> Core::model_reports() const {
  std::vector<ModelReport> out;
  for (const auto& [id, model] : models_) {
    const ModelLayout& layout = model->layout();
    ModelReport& report = out.emplace_back();
    report.id = id;
    report.name = model->name();
    report.architecture = layout.architecture;
    report.policy = brain_.policy(model->id());
    report.sessions = model->sessions;
    report.n_expert_used = layout.n_expert_used;
    report.expert_bytes_total = layout.expert_bytes_total;
    report.pool_bytes = model->pool().bytes_backed_max();
    report.pool_bytes_backed = model->pool().bytes_backed();
    report.changed_on_disk = model->changed_on_disk;
    report.bytes_read = model->bytes_read;
    report.slots_checked = model->slots_checked;
    report.slots_corrupt = model->slots_corrupt;
    report.streamed_parts = model->streamed_parts;
    report.streamed_bytes = model->streamed_bytes;
    report.prefetch = name_of(brain_.prefetch(model->id()));
    report.coming = brain_.coming(model->id());
    if (const VramSlots* device = model->device()) {
      report.spills = true;
      report.device = to_string(device->gpu().id());
      report.device_bytes = device->bytes();
      report.bytes_uploaded = device->bytes_up;
      report.bytes_demoted = device->bytes_down;
    }
    const std::span<const LayerCounters> counters = brain_.counters(model->id());
    for (std::size_t l = 0; l < layout.layers.size(); ++l) {
      const LayerCounters& c = counters[l];
      report.layers.push_back(
          {.block = layout.layers[l].block,
           .n_experts = layout.layers[l].n_experts,
           .n_slots = brain_.slots(model->id(), LayerIndex(static_cast<std::uint32_t>(l))),
           .resident = brain_.resident(model->id(), LayerIndex(static_cast<std::uint32_t>(l))),
           .slot_class = layout.layers[l].slot_class,
           .slot_bytes = layout.layers[l].slot_stride,
           .lookups = c.lookups,
           .hits = c.hits,
           .misses = c.misses,
           .insertions = c.insertions,
           .evictions = c.evictions,
           .read_failures = c.read_failures,
           .leases = c.leases,
           .leases_queued = c.leases_queued,
           .device_slots = brain_.device_slots(model->id(), LayerIndex(static_cast<std::uint32_t>(l))),
           .device_resident = brain_.device_resident(model->id(), LayerIndex(static_cast<std::uint32_t>(l))),
           .device_hits = c.device_hits,
           .rises = c.rises,
           .swaps = c.swaps,
           .prefetched = c.prefetched,
           .prefetch_used = c.prefetch_used,
           .prefetch_late = c.prefetch_late,
           .prefetch_wasted = c.prefetch_wasted,
           .prefetch_regretted = c.prefetch_regretted});
    }
    for (const LeftOut& left_out : layout.left_out)
      report.left_out.push_back({left_out.tensor, left_out.reason});
  }
  gpu_.report(&out);
  return out;
}

std::vector<SessionReport> Core::session_reports() const {
  std::vector<SessionReport> out;
  for (const auto& [id, state] : sessions_) {
    Session& session = *state.session;
    SessionReport& report = out.emplace_back();
    report.id = id;
    report.pid = session.peer().pid;
    report.uid = session.peer().uid;
    report.label = session.label();
    report.records = state.records_closed;
    report.records_refused = session.records_refused;
    for (const auto& [model_id, opened] : session.models) report.models.push_back(model_id);
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      moecached_shm_lane& words = session.lane(i);
      report.lookups += load(words.lookups);
      report.records_dropped += load(words.dropped);
      report.fallback_reads += load(words.fallback_reads);
      report.fallback_bytes += load(words.fallback_bytes);
      const Lane* lane = state.lanes[i].get();
      if (lane == nullptr) continue;
      ++report.lanes;
      report.records += lane->ring->records();
      report.leases_pending += lane->lease_pending ? 1 : 0;
      report.stalled = report.stalled || is_stalled(*lane);
    }
    gpu_.report(session, &report);
    report.connected_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - session.connected_at).count();
  }
  return out;
}

Result<std::uint32_t> Core::resolve_model(std::uint32_t wanted, const std::string& what) const {
  const std::vector<ModelReport> models = model_reports();
  if (wanted == 0 && models.size() > 1) {
    std::string names;
    for (const ModelReport& model : models)
      names += (names.empty() ? "" : ", ") + std::to_string(model.id) + " (" + model.name + ")";
    return Fault{FaultCode::kInvalid, "there are several models, say which to " + what + ": " + names};
  }
  const auto found = std::ranges::find_if(
      models, [wanted](const ModelReport& model) { return wanted == 0 || model.id == wanted; });
  if (found != models.end()) return found->id;
  return Fault{FaultCode::kNotFound, wanted == 0
                                         ? "there is no model to " + what +
                                               ": no client has opened one yet, and none was registered"
                                         : "no model " + std::to_string(wanted)};
}

Result<RoutingRecording> Core::open_recording(std::uint32_t wanted) {
  // 4 MiB hold some seconds of a fast decode; a reader that is further behind loses events, which are
  // counted.
  constexpr std::size_t kTapBytes = 4u << 20;
  auto id = resolve_model(wanted, "record");
  if (!id) return std::move(id).error();
  if (taps_.is_full()) {
    return Fault{FaultCode::kLimit, std::to_string(RoutingTaps::kMax) +
                                        " recordings are running already, which is the limit: end one"};
  }
  const std::vector<ModelReport> models = model_reports();
  const auto found = std::ranges::find(models, *id, &ModelReport::id);
  RoutingRecording recording{*found, std::make_shared<RoutingTap>(ModelId(*id), kTapBytes)};
  taps_.open(recording.tap);
  return recording;
}

StatusReport Core::status_report() const {
  StatusReport report;
  report.boot_epoch = boot_epoch_;
  report.pool_bytes_limit = config_.pool_bytes;
  report.pool_bytes_reserved = reserved_bytes();
  for (const auto& [id, model] : models_) report.pool_bytes_backed += model->pool().bytes_backed();
  report.sessions = static_cast<std::uint32_t>(sessions_.size());
  report.models = static_cast<std::uint32_t>(models_.size() + gpu_.n_models());
  report.devices.emplace_back(device_->name());
  gpu_.report_devices(&report.devices);
  report.tiers = print_tiers(config_);
  report.ssd = ssd_->stats();
  return report;
}

// A model that spills waits for the disk. Where that is often, computing on the CPU from what RAM holds may
// be faster.
void Core::spill_findings(const ModelReport& model, const std::string& subject,
                          std::vector<Finding>* out) const {
  const VramSlots& device = *models_.at(model.id)->device();
  std::uint64_t experts = 0, in_vram = 0, in_ram = 0, lookups = 0, misses = 0;
  for (const LayerReport& layer : model.layers) {
    experts += layer.n_experts;
    in_vram += layer.device_slots;
    in_ram += layer.n_slots;
    lookups += layer.lookups;
    misses += layer.misses;
  }
  const auto percent = [](std::uint64_t part, std::uint64_t all) {
    return std::to_string(all == 0 ? 0 : part * 100 / all) + " %";
  };
  out->push_back({"note", subject,
                  "spills: slots in VRAM for " + percent(in_vram, experts) + " of its experts, in RAM for " +
                      percent(in_ram, experts) + ", the others are read from disk as they are needed"});
  if (device.is_lost)
    out->push_back({"error", subject, "its GPU is lost; restart the daemon once it is back"});
  if (!device.is_allocating && !device.note.empty()) out->push_back({"warning", subject, device.note});
  if (lookups > 10'000 && misses * 20 > lookups) {
    out->push_back(
        {"warning", subject,
         percent(misses, lookups) +
             " of the lookups waited for the disk, which may be slower than llama.cpp's --cpu-moe: raise "
             "pool.bytes, gpu.slots or gpu.bytes"});
  }
}

std::vector<Finding> Core::findings() const {
  std::vector<Finding> out;
  const SsdStats ssd = ssd_->stats();
  if (!ssd.fallback_reason.empty()) {
    out.push_back({"warning", "ssd", "reads with " + ssd.engine + ": " + ssd.fallback_reason});
  } else {
    out.push_back({"ok", "ssd", "reads with " + ssd.engine + (ssd.direct ? " and O_DIRECT" : "")});
  }
  if (ssd.errors > 0) out.push_back({"error", "ssd", std::to_string(ssd.errors) + " reads failed"});
  gpu_.findings(&out);
  scrub_findings(&out);
  for (const auto& library : policy_libraries_.all()) {
    if (library->wrong_answers == 0) continue;
    out.push_back({"warning", "policy " + library->name,
                   std::to_string(library->wrong_answers) +
                       " wrong answers, in whose place lru decided; the last: " + library->last_wrong_answer +
                       ". Choose another policy, or mend the library"});
  }
  for (const ModelReport& model : model_reports()) {
    if (model.device != "host" && !model.spills) continue;
    const std::string subject = "model " + std::to_string(model.id) + " (" + model.name + ")";
    if (model.changed_on_disk) {
      out.push_back({"error", subject,
                     "the file was changed while in use; nothing more is read from it. Restart its clients "
                     "to use the new file"});
    }
    for (const LeftOutReport& left_out : model.left_out) {
      out.push_back({"note", subject, "left out: " + left_out.tensor + ": " + left_out.reason});
    }
    std::uint64_t lookups = 0, hits = 0;
    for (const LayerReport& layer : model.layers) {
      lookups += layer.lookups;
      hits += layer.hits;
      if (layer.n_slots < layer.n_experts && layer.n_slots < 2 * model.n_expert_used) {
        out.push_back({"warning", subject,
                       "layer " + std::to_string(layer.block) + " has " + std::to_string(layer.n_slots) +
                           " slots, fewer than twice the " + std::to_string(model.n_expert_used) +
                           " experts of a token: most lookups will miss; raise pool.bytes"});
        break;  // one sentence for all layers
      }
    }
    if (lookups > 10'000 && hits * 2 < lookups) {
      out.push_back({"warning", subject,
                     "only " + std::to_string(hits * 100 / lookups) +
                         " % of the lookups hit: a larger pool.bytes would help"});
    }
    if (model.spills) spill_findings(model, subject, &out);
  }
  for (const SessionReport& session : session_reports()) {
    const std::string subject = "session " + std::to_string(session.id) + " (" + session.label + ")";
    if (session.stalled) {
      out.push_back({"warning", subject,
                     "holds an epoch and does not move (stopped?); the slots it uses are kept for it"});
    }
    if (session.records_refused > 0) {
      out.push_back(
          {"error", subject, std::to_string(session.records_refused) + " records were refused as invalid"});
    }
    if (session.fallback_reads > 0) {
      out.push_back(
          {"warning", subject,
           std::to_string(session.fallback_reads) + " fallback reads: it read the model file itself"});
    }
    if (session.records_dropped > 0) {
      out.push_back(
          {"note", subject,
           std::to_string(session.records_dropped) + " routing records were dropped, its ring was full"});
    }
  }
  return out;
}

}  // namespace moecached
