// What GpuService tells the control plane.
#include <algorithm>
#include <string>
#include <vector>

#include "daemon/ipc/gpu_service_state.h"
#include "daemon/platform/clock.h"

namespace moecached {

void GpuService::report(std::vector<ModelReport>* models) const {
  std::vector<const ExpertRam*> counted;
  for (const auto& [id, entry] : models_) {
    const GpuModel& model = *entry->model;
    ModelReport& out = models->emplace_back();
    out.id = id;
    out.name = model.name();
    out.architecture = model.layout().architecture;
    out.policy = entry->policy;
    out.device = to_string(model.gpu().id());
    out.sessions = model.sessions;
    out.n_expert_used = model.layout().n_expert_used;
    out.expert_bytes_total = model.layout().expert_bytes_total;
    // Held once, so counted once: with the model that was there first.
    if (std::ranges::find(counted, &model.ram()) == counted.end()) {
      counted.push_back(&model.ram());
      out.pool_bytes = out.pool_bytes_backed = model.ram().bytes();
    }
    out.device_bytes = model.device_bytes();
    out.changed_on_disk = model.changed_on_disk;
    out.loading = model.load_state() == MOECACHED_LOADING;
    out.bytes_read = model.bytes_loaded;
    out.bytes_uploaded = model.bytes_uploaded;
    out.upload_ns = entry->device->queue->copy_ns();
    out.bytes_in_place = model.bytes_in_place;
    out.bytes_from_peers = model.bytes_from_peers;
    for (const Peer& peer : entry->peers) {
      if (entry->sessions_without_peers == 0) out.peers.push_back(to_string(peer.entry->model->gpu().id()));
    }
    out.epochs = model.epochs;
    const std::span<const LayerCounters> counters =
        entry->has_slots ? brain_.counters(model.id()) : std::span<const LayerCounters>();
    for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l) {
      const LayerLayout& layer = model.layout().layers[l];
      LayerReport& to = out.layers.emplace_back();
      to.block = layer.block;
      to.n_experts = layer.n_experts;
      to.n_slots = model.n_slots()[l];
      to.slot_class = layer.slot_class;
      to.slot_bytes = model.expert_bytes(LayerIndex(l));
      // What kernels really read, not what the table said when the log was read.
      to.lookups = model.use[l].lookups;
      to.hits = model.use[l].hits + model.use[l].peer_hits;
      out.peer_hits += model.use[l].peer_hits;
      to.misses = to.lookups - to.hits;
      if (counters.empty()) continue;
      to.resident = brain_.resident(model.id(), LayerIndex(l));
      to.insertions = counters[l].insertions;
      to.evictions = counters[l].evictions;
    }
    for (const LeftOut& left_out : model.layout().left_out)
      out.left_out.push_back({left_out.tensor, left_out.reason});
  }
}

void GpuService::report(Session& session, SessionReport* out) const {
  for (const auto& [id, opened] : session.gpu_models) out->models.push_back(id);
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
    const auto found = lanes_.find(session.id().value * MOECACHED_MAX_LANES + i);
    if (found == lanes_.end()) continue;
    const Lane& lane = *found->second;
    ++out->lanes;
    out->records += lane.records;
    out->records_refused += lane.refused;
    out->stalled = out->stalled || (load_word(lane.words->completed) < lane.begun >> 16 &&
                                    monotonic_ns() - lane.begun_since_ns > kGpuStalledAfterNs);
  }
}

std::uint64_t GpuService::device_bytes(const Gpu& gpu) const {
  std::uint64_t bytes = 0;
  for (const auto& [id, entry] : models_) {
    if (entry->device->gpu.get() == &gpu) bytes += entry->model->device_bytes();
  }
  return bytes;
}

bool GpuService::is_allocating(const Gpu& gpu) const {
  return std::ranges::any_of(models_, [&gpu](const auto& model) {
    return model.second->device->gpu.get() == &gpu && model.second->growth == Entry::Growth::kAllocating;
  });
}

void GpuService::set_spill_use(const Gpu& gpu, SpillUse use) {
  for (const auto& device : devices_) {
    if (device->gpu.get() == &gpu) device->spill_use = use;
  }
}

void GpuService::report_devices(std::vector<std::string>* devices) const {
  for (const auto& device : devices_) devices->push_back(to_string(device->gpu->id()));
}

void GpuService::findings(std::vector<Finding>* out) const {
  if (devices_.empty()) {
    out->push_back({"note", "gpu", "no GPU is served: " + no_gpu_reason_});
    return;
  }
  for (const auto& device : devices_) {
    const std::string subject = "gpu " + to_string(device->gpu->id());
    if (device->lost) {
      out->push_back(
          {"error", subject, "a copy failed, the GPU counts as lost; restart the daemon once it is back"});
    } else {
      out->push_back({"ok", subject, device->gpu->name()});
    }
    for (const auto& [other, path] : device->paths) {
      if (path.why_not.empty()) continue;
      out->push_back({"note", subject,
                      "reads RAM instead of slots of " + to_string(other->gpu->id()) + ": " + path.why_not});
    }
    if (const std::string why = device->gpu->host_memory_fallback(); !why.empty()) {
      out->push_back(
          {"warning", subject,
           "pinned memory is a registered memfd, because memory that the driver shares cannot be had: " +
               why});
    }
  }
  for (const auto& [id, entry] : models_) {
    const std::string subject = "model " + std::to_string(id) + " (" + entry->model->name() + ")";
    if (entry->model->load_state() == MOECACHED_LOAD_FAILED)
      out->push_back({"error", subject, "loading it into pinned memory failed; restart its clients"});
    if (!entry->growth_note.empty()) out->push_back({"warning", subject, entry->growth_note});
    for (const auto& [other_id, other] : models_) {
      if (!config_.gpu.peers || &other->model->ram() != &entry->model->ram() ||
          other->device->group == entry->device->group)
        continue;
      out->push_back({"note", subject,
                      "reads RAM instead of slots of " + to_string(other->model->gpu().id()) +
                          ": the driver lets neither GPU read the other's memory, or not both"});
    }
    const bool has_peers =
        std::ranges::any_of(models_, [&](const auto& other) { return may_read(*entry, *other.second); });
    if (entry->sessions_without_peers > 0 && has_peers) {
      out->push_back(
          {"note", subject,
           "all its processes on this GPU read RAM where they could read slots of other GPUs, since one "
           "of them cannot: " +
               entry->no_peers_reason});
    }
    std::uint64_t lookups = 0, hits = 0;
    for (const GpuModel::LayerUse& use : entry->model->use) {
      lookups += use.lookups;
      hits += use.hits + use.peer_hits;
    }
    if (lookups > 100'000 && hits * 2 < lookups) {
      out->push_back(
          {"warning", subject,
           "only " + std::to_string(hits * 100 / lookups) +
               " % of the lookups hit device slots; the others are read over the link, which is slower than "
               "computing on many CPU cores: raise gpu.slots or gpu.bytes"});
    }
  }
}

}  // namespace moecached
