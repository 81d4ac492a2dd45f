#include "bench/replay/peer_pools.h"

#include <algorithm>
#include <utility>

#include "daemon/residency/promotion.h"

namespace moecached::replay {

Result<std::unique_ptr<PeerPools>> PeerPools::create(const ModelShape& shape, std::uint32_t n_gpus,
                                                     double cost) {
  std::unique_ptr<PeerPools> pools(new PeerPools(shape, n_gpus));
  std::vector<ModelId> all;
  for (std::uint32_t gpu = 0; gpu < n_gpus; ++gpu) {
    if (Status added = pools->brain_.add_model(ModelId(gpu), shape); !added) return std::move(added).error();
    pools->brain_.lane_opened(LaneId(gpu), ModelId(gpu));
    all.emplace_back(gpu);
  }
  for (const ModelId model : all) pools->brain_.set_peers(model, all, cost);
  return pools;
}

PeerPools::Outcome PeerPools::event(std::uint32_t gpu, LayerIndex layer, std::span<const ExpertIndex> experts,
                                    Phase phase) {
  Outcome outcome;
  const ModelId model(gpu);
  for (const ExpertIndex expert : experts) {
    if (brain_.is_resident(model, layer, expert)) {
      ++outcome.own_hits;
    } else if (brain_.is_elsewhere(model, layer, expert)) {
      ++outcome.peer_hits;
    }
  }
  brain_.routed(LaneId(gpu), layer, experts, phase);
  if (outcome.own_hits == experts.size()) return outcome;
  std::vector<std::pair<double, ExpertIndex>> wanted;
  for (const ExpertIndex expert : experts) {
    const double gain = brain_.promotion_gain(model, layer, expert, phase);
    if (gain >= kPromotionGainMin) wanted.emplace_back(gain, expert);
  }
  std::ranges::stable_sort(wanted, [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [gain, expert] : wanted)
    outcome.insertions += promote(model, layer, expert, phase) ? 1 : 0;
  return outcome;
}

// Asked again: the promotions of this round have changed what is worth it.
bool PeerPools::promote(ModelId model, LayerIndex layer, ExpertIndex expert, Phase phase) {
  if (brain_.promotion_gain(model, layer, expert, phase) < kPromotionGainMin ||
      !brain_.promote(model, layer, expert, phase))
    return false;
  for (;;) {
    commands_.clear();
    for (const Command& command : brain_.take_commands()) commands_.push_back(command);
    if (commands_.empty()) return true;
    for (const Command& command : commands_) {
      if (command.kind == CommandKind::kUnpublish)
        brain_.grace_done(command.model, command.layer, command.slot);
      if (command.kind == CommandKind::kRead)
        brain_.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
    }
  }
}

std::uint64_t PeerPools::copies() const {
  std::uint64_t n = 0;
  for (std::uint32_t l = 0; l < shape_.layers.size(); ++l) {
    for (std::uint32_t e = 0; e < shape_.layers[l].n_experts; ++e) {
      std::uint64_t holders = 0;
      for (std::uint32_t gpu = 0; gpu < n_gpus_; ++gpu)
        holders += brain_.is_resident(ModelId(gpu), LayerIndex(l), ExpertIndex(e)) ? 1 : 0;
      n += holders > 1 ? holders - 1 : 0;
    }
  }
  return n;
}

}  // namespace moecached::replay
