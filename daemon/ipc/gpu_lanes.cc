// Lanes on GPUs: which are open, what they have completed, and which experts their logs say they used.
#include <algorithm>
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
      lane->reader = std::make_unique<GpuLogReader>(
          opened->second.model->log_geometry(),
          static_cast<std::uint32_t>(opened->second.model->layout().layers.size()),
          opened->second.model->layout().n_expert_used);
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

// One epoch's slots, token by token.
void GpuService::drain_log(Lane& lane, std::uint64_t epoch) {
  Entry& entry = *lane.entry;
  GpuModel& model = *entry.model;
  const GpuLogReader& log = *lane.reader;
  const GpuLogOutcome outcome = lane.reader->read({lane.log, model.log_bytes_per_lane()}, epoch);
  if (outcome == GpuLogOutcome::kNone) return;
  if (outcome == GpuLogOutcome::kRefused) {
    ++lane.refused;
    return;
  }
  ++lane.records;
  // Of a loaded model: a lane that only waited for it has ended epochs as well, and a slot filled before
  // would hold what was in memory before the expert.
  if (entry.first_log_ns == 0 && model.load_state() == MOECACHED_COVERED)
    entry.first_log_ns = last_active_ns_;
  const std::uint32_t k = model.layout().n_expert_used;
  for (const LayerIndex layer : log.whole()) {
    if (entry.all_resident[layer.value] == 0) {
      ++lane.refused;
      return;
    }
    // Nothing to learn where nothing can be given up.
    model.use[layer.value].lookups += std::uint64_t{log.n_tokens()} * k;
    model.use[layer.value].hits += std::uint64_t{log.n_tokens()} * k;
    entry.see(layer.value);
  }
  const bool routed = entry.has_slots && lane.known_to_brain;
  const Phase phase = log.prefill() ? Phase::kPrompt : Phase::kDecode;
  if (routed && phase == Phase::kDecode) entry.decoded += log.n_tokens();
  for (std::size_t row = 0; row < log.rows().size(); ++row) {
    const auto [layer, by_expert] = log.rows()[row];
    entry.see(layer.value);
    for (std::uint32_t token = 0; token < log.n_tokens(); ++token) {
      experts_.clear();
      std::uint64_t hits = 0, peer_hits = 0;
      for (const std::int32_t slot : log.slots(row, token)) {
        const Found found = by_expert
                                ? Found{.tier = Found::Tier::kRam, .expert = static_cast<std::uint32_t>(slot)}
                                : find_slot(entry, layer, slot);
        const std::uint32_t expert = found.expert;
        const bool is_known = expert < model.layout().layers[layer.value].n_experts;
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
      model.use[layer.value].lookups += k;
      model.use[layer.value].hits += hits;
      model.use[layer.value].peer_hits += peer_hits;
      model.bytes_from_peers += peer_hits * model.expert_bytes(layer);
      const std::uint64_t in_place = (k - hits - peer_hits) * model.expert_bytes(layer);
      model.bytes_in_place += in_place;
      entry.device->budget.read_in_place(in_place);
      taps_.put(model.id(),
                {.lane = lane.key,
                 .graph = epoch,
                 .layer = layer,
                 .token = token,
                 .n_tokens = log.n_tokens(),
                 .prefill = log.prefill()},
                experts_);
      if (lane.uses && phase == Phase::kDecode) lane.uses->add(layer, experts_);
      if (!routed) continue;
      brain_.routed(lane.id, layer, experts_, phase);
      shadows_.event(model.id(), layer, experts_, phase, hits);  // they have this GPU's slots alone
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
