// A pool of slots in which reads, copies and grace periods take no time, around a brain of its own: what a
// policy would have had resident, event by event. Plays the shell as Core does (leases) or GpuService
// (promotions that gain more than kPromotionGainMin, with room on the link for all of them). Replays and
// shadow policies are made of it, so that they count alike.
//
// Pure. Thread: one. Memory: the brain's, sized by create; event() allocates nothing once warm.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/residency/brain.h"

namespace moecached {

enum class MissMode : std::uint8_t {
  kPool,     // CPU host: every miss is loaded into a slot before it is used
  kCovered,  // GPU: a miss is read in place; a promotion must gain more than kPromotionGainMin
};

class InstantPool {
 public:
  struct Outcome {
    std::uint32_t hits = 0;
    std::uint32_t insertions = 0;
    bool too_wide = false;  // more experts than slots: those absent are streamed
  };

  // Of scope global its layers trade slots, as fast as a shell without grace periods could.
  // kInvalid: a policy or slots that cannot be.
  [[nodiscard]] static Result<std::unique_ptr<InstantPool>> create(const ModelShape& shape, MissMode mode,
                                                                   std::uint32_t n_lanes = 1);
  Outcome event(LaneId lane, LayerIndex layer, std::span<const ExpertIndex> experts,
                Phase phase = Phase::kDecode);
  // Into a free slot, as if loaded before; false: there is none, or it is resident.
  bool preload(LayerIndex layer, ExpertIndex expert);
  Status seed(std::span<const std::vector<double>> uses_per_step);
  void set_costs(LayerIndex layer, const PolicyCosts& costs) { brain_.set_costs(kModel, layer, costs); }

  [[nodiscard]] std::span<const LayerCounters> counters() const { return brain_.counters(kModel); }
  [[nodiscard]] std::uint32_t slots(LayerIndex layer) const { return brain_.slots(kModel, layer); }  // open
  [[nodiscard]] PrefetchState prefetch() const { return brain_.prefetch(kModel); }
  [[nodiscard]] bool is_resident(LayerIndex layer, ExpertIndex expert) const {
    return resident_[first_[layer.value] + expert.value] != 0;
  }

 private:
  static constexpr ModelId kModel{0};
  InstantPool(const ModelShape& shape, MissMode mode);
  void promote(LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase);
  void trade(LayerIndex busy);
  void carry_out_commands();

  struct Candidate {
    double gain;
    ExpertIndex expert;
  };
  const MissMode mode_;
  Brain brain_;
  std::vector<std::uint32_t> first_;    // by layer
  std::vector<std::uint8_t> resident_;  // the slot table: a book beside the brain's
  Outcome outcome_;
  GrantStatus granted_ = GrantStatus::kOk;
  std::uint32_t seq_ = 0, granted_seq_ = 0;
  std::uint64_t epoch_ = 0;
  std::vector<Command> commands_;      // scratch
  std::vector<Candidate> candidates_;  // scratch
};

}  // namespace moecached
