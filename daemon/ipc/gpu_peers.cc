// The peer tier: a model that several GPUs compute, each with slots of its own, read each other's. Entry of a
// table: the slot on this GPU, else that of a peer, else RAM. A lane reads a peer's slot as it reads its own,
// so what holds for a slot holds for all who may read it: its memory is mapped before an entry names it, and
// it is given to another expert only when every reader's table has been flipped and every reader's lane has
// ended the epoch it was in.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/ipc/gpu_service_state.h"

namespace moecached {
namespace {

// A way that is hardly faster than RAM is not worth the slots of a second copy that it saves.
constexpr double kFasterThanRam = 1.2;
constexpr std::uint64_t kMeasureAgainAfterNs = 10'000'000'000;
// Of a queue: for promotions, and for evictions of its peers.
constexpr std::size_t kRoomForOthers = 4096;

}  // namespace

// Windows have sections for GPUs that can read each other alone: empty slots are not for nothing.
void GpuService::find_groups() {
  std::vector<std::vector<Device*>> groups;
  for (const auto& device : devices_) {
    const auto is_mutual = [&](const Device* other) {
      return device->gpu->can_read(*other->gpu) && other->gpu->can_read(*device->gpu);
    };
    auto group = groups.end();
    if (config_.gpu.peers)
      group = std::ranges::find_if(groups, [&](const auto& g) { return std::ranges::all_of(g, is_mutual); });
    if (group == groups.end()) group = groups.emplace(group);
    device->group = static_cast<std::uint32_t>(group - groups.begin());
    group->push_back(device.get());
  }
  for (const auto& group : groups) {
    for (std::uint32_t i = 0; i < group.size(); ++i)
      group[i]->place = {.own = i, .n = static_cast<std::uint32_t>(group.size())};
  }
}

GpuSections GpuService::place_of(const Gpu& gpu) const {
  const auto found =
      std::ranges::find_if(devices_, [&](const auto& device) { return device->gpu.get() == &gpu; });
  CHECK(found != devices_.end());
  return (*found)->place;
}

Result<std::vector<UniqueFd>> GpuService::share_probes(const GpuId& id) const {
  auto gpu = find_gpu(id);
  if (!gpu) return std::move(gpu).error();
  const auto own =
      std::ranges::find_if(devices_, [&](const auto& device) { return device->gpu.get() == *gpu; });
  std::vector<UniqueFd> shared;
  for (const auto& device : devices_) {
    if (device == *own || device->group != (*own)->group || device->lost) continue;
    auto probe = (*gpu)->share_probe(*device->gpu);
    // Full or failing: it has no slots to be read.
    if (probe) shared.push_back(*std::move(probe));
  }
  return shared;
}

// ------------------------------------------------------------------------------------------ who reads whom

bool GpuService::may_read(const Entry& reader, const Entry& peer) const {
  return reader.device != peer.device && reader.device->group == peer.device->group && !reader.device->lost &&
         !peer.device->lost && &reader.model->ram() == &peer.model->ram() &&
         reader.model->peer_group() == peer.model->peer_group();
}

// On lost GPUs too: a process there may be in an epoch that reads the peer's slots.
std::vector<GpuService::Entry*> GpuService::readers_of(const Entry& peer) const {
  std::vector<Entry*> readers;
  for (const auto& [id, entry] : models_) {
    if (std::ranges::find(entry->peers, &peer, &Peer::entry) != entry->peers.end())
      readers.push_back(entry.get());
  }
  return readers;
}

// The rate at which the reader copies from the peer, bytes per second; 0: not known yet, or not worth it.
double GpuService::peer_rate(Entry& reader, const Entry& peer, std::uint64_t now_ns) {
  Path& path = reader.device->paths[peer.device];
  switch (path.state) {
    case Path::State::kMeasuring:
    case Path::State::kNotUsed:
      return 0;
    case Path::State::kUsed:
      return path.rate;
    case Path::State::kUnknown:
      break;
  }
  if (!path.measured) {
    if (now_ns < path.not_before_ns) return 0;
    path.state = Path::State::kMeasuring;
    Pending pending;
    pending.kind = Pending::Kind::kMeasure;
    pending.model = reader.model;
    pending.path = &path;
    pending.measured = std::make_shared<Result<double>>(0.0);
    GpuQueue::Job job;
    job.call = [rate = pending.measured, &gpu = *reader.device->gpu, &other = *peer.device->gpu] {
      *rate = gpu.measure_peer_rate(other);
    };
    submit(*reader.model, std::move(job), std::move(pending));
    return 0;
  }
  const Result<double> rate = *std::exchange(path.measured, nullptr);
  if (!rate && rate.error().code != FaultCode::kUnsupported) {  // no memory for it now
    path.not_before_ns = now_ns + kMeasureAgainAfterNs;
    path.why_not = rate.error().text;
    return 0;
  }
  const std::string names =
      to_string(reader.device->gpu->id()) + " and its peer " + to_string(peer.device->gpu->id());
  if (!rate || *rate < kFasterThanRam * reader.device->budget.link_rate()) {
    path.state = Path::State::kNotUsed;
    path.why_not = !rate ? rate.error().text : "that is not faster";
    spdlog::warn("gpu {}: slots are not shared: {}", names, path.why_not);
    return 0;
  }
  path.state = Path::State::kUsed;
  path.rate = *rate;
  path.why_not.clear();
  spdlog::info("gpu {}: slots are read at {:.0f} GB/s", names, *rate / 1e9);
  return path.rate;
}

void GpuService::look_for_peers(std::uint64_t now_ns) {
  if (models_.size() < 2) return;
  for (const auto& [id, entry] : models_) {
    Entry& reader = *entry;
    if (reader.model->load_state() != MOECACHED_COVERED) continue;
    for (const auto& [other_id, other] : models_) {
      if (!may_read(reader, *other) || other->slots_version == 0) continue;
      const auto known = std::ranges::find(reader.peers, other.get(), &Peer::entry);
      if (known != reader.peers.end()) {
        if (known->is_mapping || known->version == other->slots_version) continue;
      } else {
        const double rate = peer_rate(reader, *other, now_ns);
        if (rate == 0 || reader.sessions_without_peers > 0) continue;
        reader.peers.push_back({.entry = other.get(),
                                .version = 0,
                                .rate = rate,
                                .is_mapping = false,
                                .n_visible = std::vector<std::uint32_t>(other->n_open.size(), 0),
                                .n_coming = {}});
      }
      map_peer(reader, *other);
    }
  }
}

// Lanes that begin from now on map the peer's memory first; the others have to end their epochs before an
// entry may name it.
void GpuService::map_peer(Entry& reader, Entry& peer) {
  const auto known = std::ranges::find(reader.peers, &peer, &Peer::entry);
  known->version = peer.slots_version;
  if (!reader.model->add_peer_chunks(peer.model)) {
    spdlog::warn("model {}: slots were added to its peers too often; those of now stay out of reach",
                 reader.model->id().value);
    return;
  }
  reader.model->publish_chunks();
  known->is_mapping = true;
  known->n_coming = peer.n_open;
  const auto index = static_cast<std::uint32_t>(known - reader.peers.begin());
  begin_grace(growth_grace_,
              {.model = reader.model->id(), .layer = {}, .slot = SlotIndex(1 + index), .expert = {}},
              &grown_);
  slots_mapped();
}

void GpuService::peer_mapped(Entry& reader, std::size_t index) {
  if (index >= reader.peers.size()) return;  // of a GPU that was lost meanwhile
  Peer& peer = reader.peers[index];
  peer.is_mapping = false;
  peer.n_visible = std::move(peer.n_coming);
  GpuModel& model = *reader.model;
  for (std::uint32_t l = 0; l < peer.n_visible.size(); ++l) {
    // A layer that is to be wholly resident keeps stock's shape.
    if (peer.n_visible[l] == 0 || reader.n_open[l] > 0) continue;
    model.set_shape(LayerIndex(l), MOECACHED_SHAPE_MIXED);
  }
  tell_brain_of_peers(reader);
  repoint_all(reader);
}

void GpuService::tell_brain_of_peers(const Entry& reader) {
  std::vector<ModelId> ids;
  double rate = 0;
  for (const Peer& peer : reader.peers) {
    if (reader.sessions_without_peers > 0) break;
    ids.push_back(peer.entry->model->id());
    rate = rate == 0 ? peer.rate : std::min(rate, peer.rate);
  }
  const double ram = reader.device->budget.link_rate() * kInPlacePerCopyRate;
  brain_.set_peers(reader.model->id(), ids, ids.empty() ? 1 : std::min(1.0, ram / rate));
}

void GpuService::forget_peer(Entry& reader, const Entry& peer) {
  const auto known = std::ranges::find(reader.peers, &peer, &Peer::entry);
  if (known == reader.peers.end()) return;
  // Tickets of growth_grace_ name peers by their place, so no other may take it.
  CHECK(reader.model->sessions == 0 || peer.device->lost);
  growth_grace_.model_gone(reader.model->id());
  const bool was_growing = reader.growth == Entry::Growth::kMapping;
  reader.peers.erase(known);
  for (Peer& other : reader.peers) {
    if (std::exchange(other.is_mapping, false)) other.version = 0;  // mapped again
  }
  if (was_growing) {
    begin_grace(growth_grace_, {.model = reader.model->id(), .layer = {}, .slot = {}, .expert = {}}, &grown_);
    slots_mapped();
  }
  tell_brain_of_peers(reader);
  repoint_all(reader);
  hold_until_repointed(reader);
}

// -------------------------------------------------------------------------------------------------- entries

std::int32_t GpuService::best_entry(const Entry& entry, LayerIndex layer, ExpertIndex expert) {
  const GpuModel& model = *entry.model;
  if (const std::uint32_t slot = model.own_slot(layer, expert); slot != GpuModel::kNowhere)
    return model.device_entry(layer, slot);
  if (entry.sessions_without_peers == 0) {
    for (const Peer& peer : entry.peers) {
      const GpuModel& other = *peer.entry->model;
      const std::uint32_t slot = other.own_slot(layer, expert);
      if (slot != GpuModel::kNowhere && slot < peer.n_visible[layer.value])
        return other.device_entry(layer, slot);
    }
  }
  return model.host_entry(layer, expert);
}

GpuService::Found GpuService::find_slot(const Entry& entry, LayerIndex layer, std::int32_t slot) {
  const GpuModel& model = *entry.model;
  if (slot < 0) return {};
  const auto index = static_cast<std::uint32_t>(slot);
  const std::uint32_t host_first = model.plan(layer).host_first;
  if (index >= host_first) {
    const std::uint32_t expert = index - host_first;
    return {.tier = Found::Tier::kRam,
            .expert = expert < model.layout().layers[layer.value].n_experts ? expert : GpuModel::kNowhere};
  }
  const std::uint32_t first = model.plan(layer).own_first();
  if (index >= first && index - first < model.n_slots()[layer.value])
    return {.tier = Found::Tier::kOwn, .expert = model.put_into(layer, index - first)};
  for (const Peer& peer : entry.peers) {
    const GpuModel& other = *peer.entry->model;
    const std::uint32_t first_of = other.plan(layer).own_first();
    if (index >= first_of && index - first_of < peer.n_visible[layer.value])
      return {.tier = Found::Tier::kPeer, .expert = other.put_into(layer, index - first_of)};
  }
  return {};
}

// A change at one GPU may concern every entry of another's table, which are more flips than its queue holds.
void GpuService::repoint(Entry& entry, LayerIndex layer, ExpertIndex expert) {
  if (entry.device->lost || std::exchange(entry.is_stale[layer.value][expert.value], 1) != 0) return;
  entry.stale.emplace_back(layer, expert);
}

void GpuService::repoint_all(Entry& entry) {
  for (std::uint32_t l = 0; l < entry.is_stale.size(); ++l) {
    for (std::uint32_t e = 0; e < entry.is_stale[l].size(); ++e)
      repoint(entry, LayerIndex(l), ExpertIndex(e));
  }
  submit_repoints(entry);
}

void GpuService::submit_repoints(Entry& entry) {
  while (!entry.stale.empty() && entry.device->queue->room() > kRoomForOthers) {
    const auto [layer, expert] = entry.stale.front();
    entry.stale.pop_front();
    entry.is_stale[layer.value][expert.value] = 0;
    const std::int32_t best = best_entry(entry, layer, expert);
    if (best == entry.model->entry(layer, expert) || entry.device->lost) continue;
    Pending pending;
    pending.kind = Pending::Kind::kRepoint;
    pending.model = entry.model;
    ++entry.repointing;
    GpuQueue::Job job;
    job.is_flip = true;
    job.flip = entry.model->flip(layer, expert, best);
    submit(*entry.model, std::move(job), std::move(pending));
  }
  end_hold(entry);
}

// Entries on the GPU may still name what its lanes must not read. Those of all its processes wait: as long as
// the flips take, milliseconds where nothing else is in the queue.
void GpuService::hold_until_repointed(Entry& entry) {
  if ((entry.stale.empty() && entry.repointing == 0) || entry.model->load_state() != MOECACHED_COVERED)
    return;
  entry.model->set_load_state(MOECACHED_LOADING);
  entry.is_held = true;
}

void GpuService::end_hold(Entry& entry) {
  if (!entry.is_held || !entry.stale.empty() || entry.repointing > 0) return;
  entry.is_held = false;
  if (entry.model->load_state() == MOECACHED_LOADING) entry.model->set_load_state(MOECACHED_COVERED);
}

void GpuService::repointed(Entry& entry) {
  --entry.repointing;
  end_hold(entry);
}

// Of the brain's kUnpublish. Flips of one GPU are done in order, so that of a reader is made even where its
// table names another slot by now: the flip that made it do so may not be done yet.
void GpuService::unpublish(Entry& entry, const Command& command) {
  entry.model->take(command.layer, command.expert);
  std::vector<Entry*> who = readers_of(entry);
  who.insert(who.begin(), &entry);
  std::erase_if(who, [](const Entry* reader) { return reader->device->lost.load(); });
  const auto flips_left = std::make_shared<std::size_t>(who.size());
  for (Entry* reader : who) {
    if (reader != &entry) ++reader->repointing;
    Pending pending;
    pending.kind = Pending::Kind::kUnpublish;
    pending.model = entry.model;
    pending.reader = reader->model;
    pending.layer = command.layer;
    pending.expert = command.expert;
    pending.slot = command.slot;
    pending.flips_left = flips_left;
    GpuQueue::Job job;
    job.is_flip = true;
    job.flip = reader->model->flip(command.layer, command.expert,
                                   best_entry(*reader, command.layer, command.expert));
    submit(*reader->model, std::move(job), std::move(pending));
  }
}

// -------------------------------------------------------------------------------------------------- sessions

// A process that cannot map its peers' memory must not begin before no entry names it.
void GpuService::session_without_peers(Entry& entry, const std::string& reason) {
  entry.no_peers_reason = reason;
  if (++entry.sessions_without_peers > 1) return;
  if (!entry.peers.empty()) {
    spdlog::warn("model {}: reads no slots of other GPUs while a process computes it that cannot: {}",
                 entry.model->id().value, reason);
    tell_brain_of_peers(entry);
    repoint_all(entry);
  }
  hold_until_repointed(entry);
}

void GpuService::session_without_peers_gone(Entry& entry) {
  if (--entry.sessions_without_peers > 0) return;
  tell_brain_of_peers(entry);
  repoint_all(entry);
}

}  // namespace moecached
