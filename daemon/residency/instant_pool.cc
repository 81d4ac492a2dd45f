#include "daemon/residency/instant_pool.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/residency/promotion.h"

namespace moecached {

InstantPool::InstantPool(const ModelShape& shape, MissMode mode) : mode_(mode) {
  std::uint32_t n = 0, widest = 0;
  for (const LayerShape& layer : shape.layers) {
    first_.push_back(n);
    n += layer.n_experts;
    widest = std::max(widest, layer.n_experts);
  }
  resident_.resize(n);
  commands_.reserve(std::size_t{3} * widest);
  candidates_.reserve(widest);
}

Result<std::unique_ptr<InstantPool>> InstantPool::create(const ModelShape& shape, MissMode mode,
                                                         std::uint32_t n_lanes) {
  std::unique_ptr<InstantPool> pool(new InstantPool(shape, mode));
  if (Status added = pool->brain_.add_model(kModel, shape); !added) return std::move(added).error();
  for (std::uint32_t lane = 0; lane < n_lanes; ++lane) pool->brain_.lane_opened(LaneId(lane), kModel);
  return pool;
}

InstantPool::Outcome InstantPool::event(LaneId lane, LayerIndex layer, std::span<const ExpertIndex> experts,
                                        Phase phase) {
  outcome_ = {};
  const std::uint8_t* resident = &resident_[first_[layer.value]];
  for (const ExpertIndex expert : experts) outcome_.hits += resident[expert.value];
  const bool missed = outcome_.hits < experts.size();
  if (mode_ == MissMode::kCovered || !missed) {
    brain_.routed(lane, layer, experts, phase);
    if (missed) promote(layer, experts, phase);
    if (missed) trade(layer);
    carry_out_commands();  // what was prefetched
    return outcome_;
  }
  if (experts.size() > brain_.slots(kModel, layer)) {
    // A client streams these, without slots; the hits among them are all that the brain learns to keep.
    outcome_.too_wide = true;
    brain_.routed(lane, layer, experts, phase);
    carry_out_commands();
    return outcome_;
  }
  brain_.lease(lane, layer, experts, ++seq_, ++epoch_, phase);
  carry_out_commands();
  CHECK(granted_seq_ == seq_);
  // A prompt that decode leaves no room streams, as those that are too wide do.
  CHECK(granted_ == GrantStatus::kOk || (granted_ == GrantStatus::kNoRoom && phase == Phase::kPrompt));
  brain_.epoch_completed(lane, epoch_);
  trade(layer);
  return outcome_;
}

void InstantPool::trade(LayerIndex busy) {
  if (brain_.trade_slots(kModel, busy)) carry_out_commands();
}

bool InstantPool::preload(LayerIndex layer, ExpertIndex expert) {
  if (brain_.free_slots(kModel, layer) == 0 || !brain_.promote(kModel, layer, expert)) return false;
  carry_out_commands();
  return true;
}

Status InstantPool::seed(std::span<const std::vector<double>> uses_per_step) {
  return brain_.seed(kModel, uses_per_step);
}

void InstantPool::promote(LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase) {
  candidates_.clear();
  const std::uint8_t* resident = &resident_[first_[layer.value]];
  for (const ExpertIndex expert : experts) {
    if (resident[expert.value] != 0) continue;
    const double gain = brain_.promotion_gain(kModel, layer, expert, phase);
    if (gain >= kPromotionGainMin) candidates_.push_back({gain, expert});
  }
  // Stable by hand, since a stable sort takes memory: there are as many as a token has experts.
  for (std::size_t i = 1; i < candidates_.size(); ++i) {
    for (std::size_t j = i; j > 0 && candidates_[j].gain > candidates_[j - 1].gain; --j)
      std::swap(candidates_[j], candidates_[j - 1]);
  }
  for (const Candidate& candidate : candidates_) {
    // Asked again: the promotions of this round have changed what is worth it.
    if (&candidate != candidates_.data() &&
        brain_.promotion_gain(kModel, layer, candidate.expert, phase) < kPromotionGainMin)
      continue;
    if (brain_.promote(kModel, layer, candidate.expert, phase)) carry_out_commands();
  }
}

void InstantPool::carry_out_commands() {
  for (;;) {
    const std::span<const Command> taken = brain_.take_commands();
    if (taken.empty()) return;
    commands_.assign(taken.begin(), taken.end());  // the span ends with the next event
    for (const Command& command : commands_) {
      // kGrant and kRelease name no expert.
      const std::size_t entry = first_[command.layer.value] + command.expert.value;
      switch (command.kind) {
        case CommandKind::kUnpublish:
          resident_[entry] = 0;
          brain_.grace_done(command.model, command.layer, command.slot);
          break;
        case CommandKind::kRead:
          brain_.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
          break;
        case CommandKind::kHasten:
          break;
        case CommandKind::kPublish:
          resident_[entry] = 1;
          ++outcome_.insertions;
          break;
        case CommandKind::kGrant:
          granted_seq_ = command.seq;
          granted_ = command.status;
          break;
        case CommandKind::kRelease:  // no memory is behind its slots
        case CommandKind::kCopyUp:   // it has no device slots
        case CommandKind::kCopyAside:
        case CommandKind::kMove:
        case CommandKind::kSpareFreed:
          break;
      }
    }
  }
}

}  // namespace moecached
