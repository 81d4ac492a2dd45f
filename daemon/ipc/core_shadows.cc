// The core loop's part in shadow policies: challengers see what the live policy sees.
#include "daemon/ipc/core.h"

namespace moecached {

std::uint64_t Core::hits_of(const Lane& lane, LayerIndex layer) const {
  if (shadows_.is_empty()) return 0;
  return brain_.counters(lane.model->id())[layer.value].hits;
}

void Core::shadow(const Lane& lane, const LaneMessage& message, Phase phase, std::uint64_t hits_before) {
  if (shadows_.is_empty()) return;
  shadows_.event(lane.model->id(), message.layer, message.ids, phase,
                 hits_of(lane, message.layer) - hits_before);
}

Result<Core::ShadowBasis> Core::shadow_basis(std::uint32_t id) const {
  ShadowBasis basis;
  if (const auto gpu_model = gpu_.find_model(id)) {
    basis.mode = MissMode::kCovered;
    basis.shape = gpu_.shape(ModelId(id));
    if (basis.shape.layers.empty()) {
      return Fault{FaultCode::kInvalid, "model " + std::to_string(id) +
                                            " has no device slots yet, which come with the first graph of a "
                                            "client: try again then"};
    }
    return basis;
  }
  const auto model = find_model(ModelId(id));
  if (model == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id)};
  basis.shape = model->shape();
  basis.shape.policy = brain_.policy(model->id());
  // As they are now: challengers trade on from there.
  for (std::uint32_t l = 0; l < basis.shape.layers.size(); ++l)
    basis.shape.layers[l].n_slots = brain_.slots(model->id(), LayerIndex(l));
  basis.shape.prefetch = brain_.prefetch(model->id()) != PrefetchState::kOff;
  return basis;
}

Status Core::start_shadows(std::unique_ptr<ShadowSet> set) {
  const bool on_gpu = set->mode == MissMode::kCovered;
  return shadows_.start(std::move(set), on_gpu ? gpu_.brain() : brain_);
}

Result<ShadowSnapshot> Core::shadow_snapshot(std::uint32_t id) const {
  const ModelId model(id);
  const ShadowSet* set = shadows_.find(model);
  if (set == nullptr) {
    return Fault{FaultCode::kInvalid, "model " + std::to_string(id) +
                                          " has no challengers: name them with `moecachectl policy shadow`"};
  }
  const auto gpu_model = gpu_.find_model(id);
  const Brain& live = gpu_model ? gpu_.brain() : brain_;
  ShadowSnapshot out;
  out.shape = set->shape;
  out.mode = set->mode;
  out.n_expert_used =
      gpu_model ? gpu_model->layout().n_expert_used : find_model(model)->layout().n_expert_used;
  for (const BlockShape& shape : uses_.shapes(model)) out.blocks.push_back(shape.block);
  const auto add = [&](const std::string& policy, std::span<const LayerCounters> counters,
                       std::span<const LayerCounters> before, const auto& is_resident) {
    out.policies.push_back(policy);
    std::vector<LayerCounters>& since = out.counters.emplace_back();
    std::vector<std::uint8_t>& resident = out.resident.emplace_back();
    for (std::uint32_t l = 0; l < counters.size(); ++l) {
      since.push_back({.lookups = counters[l].lookups - before[l].lookups,
                       .hits = counters[l].hits - before[l].hits,
                       .misses = counters[l].misses - before[l].misses,
                       .insertions = counters[l].insertions - before[l].insertions,
                       .evictions = counters[l].evictions - before[l].evictions,
                       .read_failures = 0,
                       .leases = counters[l].leases - before[l].leases,
                       .leases_queued = 0});
      for (std::uint32_t e = 0; e < set->shape.layers[l].n_experts; ++e)
        resident.push_back(is_resident(LayerIndex(l), ExpertIndex(e)) ? 1 : 0);
    }
  };
  add(live.policy(model), live.counters(model), set->live_before,
      [&](LayerIndex layer, ExpertIndex expert) { return live.is_resident(model, layer, expert); });
  for (std::size_t i = 0; i < set->pools.size(); ++i) {
    const InstantPool& pool = *set->pools[i];
    add(set->specs[i], pool.counters(), set->before[i],
        [&](LayerIndex layer, ExpertIndex expert) { return pool.is_resident(layer, expert); });
  }
  return out;
}

}  // namespace moecached
