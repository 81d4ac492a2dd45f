// Lanes on GPUs: which are open, what they have completed, and which experts their logs say they used.
#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/ipc/gpu_service_state.h"

namespace moecached {
namespace {

constexpr std::size_t kCandidatesMax = 4096;

}  // namespace

void GpuService::sync_lanes(std::span<Session* const> sessions) {
  sessions_.assign(sessions.begin(), sessions.end());
  for (Session* session : sessions) {
    if (session->gpu_models.empty()) continue;
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      moecached_shm_lane& words = session->lane(i);
      const std::uint64_t key = session->id().value * MOECACHED_MAX_LANES + i;
      const bool open = std::atomic_ref(words.state).load(std::memory_order_acquire) == 1;
      const std::uint32_t model_id = std::atomic_ref(words.model_id).load(std::memory_order_relaxed);
      const auto opened = session->gpu_models.find(model_id);
      const auto known = lanes_.find(key);
      if (known != lanes_.end()) {
        if (open && opened != session->gpu_models.end() &&
            opened->second.model == known->second->entry->model)
          continue;
        drain_lane(*known->second, last_active_ns_);
        close_lane(key);
      }
      if (!open || opened == session->gpu_models.end() || find_entry(ModelId(model_id)) == nullptr) continue;
      auto lane = std::make_unique<Lane>();
      lane->key = key;
      if (free_lane_ids_.empty()) {
        lane->id = LaneId(next_lane_id_++);
      } else {
        lane->id = LaneId(free_lane_ids_.back());
        free_lane_ids_.pop_back();
      }
      lane->entry = models_.at(model_id).get();
      lane->words = &words;
      lane->uses = uses_.of_label(ModelId(model_id), session->label());
      lane->log = opened->second.log->bytes().data() + i * opened->second.model->log_bytes_per_lane();
      lane->drained = load_word(words.completed);
      std::atomic_ref(words.tail).store(lane->drained, std::memory_order_release);
      lanes_[key] = std::move(lane);
    }
  }
}

void GpuService::close_lane(std::uint64_t key) {
  // Also of lanes that never said they are open: grace periods look at the words of every lane.
  grace_.lane_gone(key);
  growth_grace_.lane_gone(key);
  const auto found = lanes_.find(key);
  if (found == lanes_.end()) return;
  if (found->second->known_to_brain) brain_.lane_closed(found->second->id);
  free_lane_ids_.push_back(found->second->id.value);
  lanes_.erase(found);
}

void GpuService::drain_lane(Lane& lane, std::uint64_t now_ns) {
  const std::uint64_t begun = load_word(lane.words->begun);
  const std::uint64_t completed = load_word(lane.words->completed);
  if (begun != lane.begun || completed >= begun >> 16) {
    lane.begun = begun;
    lane.begun_since_ns = now_ns;
  }
  if (completed <= lane.drained) return;
  last_active_ns_ = now_ns;
  Entry& entry = *lane.entry;
  entry.model->last_used = now_ns;
  // A client that is further ahead than its log is long has logged the oldest epochs and dropped the later
  // ones: it never writes over what is not drained. Counted, not compared: it may have written any number.
  const std::uint64_t entries = entry.model->log_geometry().log_entries;
  const std::uint64_t n = std::min(completed - lane.drained, entries);
  for (std::uint64_t i = 1; i <= n; ++i) drain_log(lane, lane.drained + i);
  entry.model->epochs += n;
  lane.drained = completed;
  std::atomic_ref(lane.words->tail).store(completed, std::memory_order_release);
}

// One epoch's slots, token by token. The client wrote header and layers, its GPU the slots: all of it is
// copied once and checked.
void GpuService::drain_log(Lane& lane, std::uint64_t epoch) {
  Entry& entry = *lane.entry;
  GpuModel& model = *entry.model;
  const moecached_shm_gpu& geometry = model.log_geometry();
  const std::byte* at = lane.log + (epoch % geometry.log_entries) * geometry.log_entry_bytes;
  moecached_shm_log_entry header;
  std::memcpy(&header, at, sizeof header);
  if (header.epoch != epoch) return;  // not logged: the ring was full, or nothing to tell
  const std::size_t n_layers = model.layout().layers.size();
  const std::uint32_t k = model.layout().n_expert_used;
  if (header.n_whole > n_layers || header.n_layers > n_layers - header.n_whole ||
      header.n_layers + header.n_whole == 0 || header.n_tokens == 0 ||
      header.n_tokens > MOECACHED_LOG_TOKENS) {
    ++lane.refused;
    return;
  }
  ++lane.records;
  // Of a loaded model: a lane that only waited for it has ended epochs as well, and a slot filled before
  // would hold what was in memory before the expert.
  if (entry.first_log_ns == 0 && model.load_state() == MOECACHED_COVERED)
    entry.first_log_ns = last_active_ns_;
  auto layer_at = [&](std::uint32_t row) {
    std::uint16_t index = 0;
    std::memcpy(&index, at + sizeof header + row * sizeof index, sizeof index);
    return index;
  };
  for (std::uint32_t row = header.n_layers; row < header.n_layers + header.n_whole; ++row) {
    const std::uint16_t index = layer_at(row);
    if (index >= n_layers || entry.all_resident[index] == 0) {
      ++lane.refused;
      return;
    }
    // Nothing to learn where nothing can be given up.
    model.use[index].lookups += std::uint64_t{header.n_tokens} * k;
    model.use[index].hits += std::uint64_t{header.n_tokens} * k;
    entry.see(index);
  }
  const bool routed = entry.has_slots && lane.known_to_brain;
  const Phase phase = (header.flags & MOECACHED_FLAG_PREFILL) != 0 ? Phase::kPrompt : Phase::kDecode;
  if (routed && phase == Phase::kDecode) entry.decoded += header.n_tokens;
  std::vector<std::int32_t> slots(std::size_t{header.n_tokens} * k);
  for (std::uint32_t row = 0; row < header.n_layers; ++row) {
    std::uint16_t layer_index = layer_at(row);
    const bool by_expert = (layer_index & MOECACHED_LOG_BY_EXPERT) != 0;
    layer_index = static_cast<std::uint16_t>(layer_index & ~MOECACHED_LOG_BY_EXPERT);
    if (layer_index >= n_layers) {
      ++lane.refused;
      return;
    }
    const LayerIndex layer(layer_index);
    entry.see(layer_index);
    std::memcpy(slots.data(), at + geometry.log_slots_offset + std::size_t{row} * geometry.log_layer_bytes,
                slots.size() * sizeof(std::int32_t));
    for (std::uint32_t token = 0; token < header.n_tokens; ++token) {
      experts_.clear();
      std::uint64_t hits = 0, peer_hits = 0;
      for (std::uint32_t i = 0; i < k; ++i) {
        const std::int32_t slot = slots[std::size_t{token} * k + i];
        const Found found = by_expert ? Found{.tier = Found::Tier::kRam, .expert = static_cast<std::uint32_t>(slot)}
                                      : find_slot(entry, layer, slot);
        const std::uint32_t expert = found.expert;
        const bool is_known = expert < model.layout().layers[layer_index].n_experts;
        if (!is_known || std::exchange(marks_[expert], 1) != 0) {
          for (const ExpertIndex marked : experts_) marks_[marked.value] = 0;
          ++lane.refused;
          return;
        }
        experts_.push_back(ExpertIndex(expert));
        hits += found.tier == Found::Tier::kOwn ? 1 : 0;
        peer_hits += found.tier == Found::Tier::kPeer ? 1 : 0;
      }
      for (const ExpertIndex marked : experts_) marks_[marked.value] = 0;
      model.use[layer_index].lookups += k;
      model.use[layer_index].hits += hits;
      model.use[layer_index].peer_hits += peer_hits;
      model.bytes_from_peers += peer_hits * model.expert_bytes(layer);
      const std::uint64_t in_place = (k - hits - peer_hits) * model.expert_bytes(layer);
      model.bytes_in_place += in_place;
      entry.device->budget.read_in_place(in_place);
      taps_.put(model.id(),
                {.lane = lane.key,
                 .graph = epoch,
                 .layer = layer,
                 .token = token,
                 .n_tokens = header.n_tokens,
                 .prefill = (header.flags & MOECACHED_FLAG_PREFILL) != 0},
                experts_);
      if (lane.uses && phase == Phase::kDecode) lane.uses->add(layer, experts_);
      if (!routed) continue;
      brain_.routed(lane.id, layer, experts_, phase);
      shadows_.event(model.id(), layer, experts_, phase, hits + peer_hits);
      if (test_churn_) continue;
      for (const ExpertIndex expert : experts_) {
        if (hits == k || entry.candidates.size() >= kCandidatesMax) break;
        // Those that were hits turn out to gain nothing.
        entry.candidates.push_back({.gain = 0, .layer = layer, .expert = expert, .phase = phase});
      }
    }
  }
}

Result<std::shared_ptr<Memfd>> make_log_segment(const GpuModel& model) {
  auto memory =
      Memfd::create("log", MOECACHED_MAX_LANES * model.log_bytes_per_lane(), ClientAccess::kReadWrite);
  if (!memory) return std::move(memory).error();
  return std::make_shared<Memfd>(*std::move(memory));
}

}  // namespace moecached
