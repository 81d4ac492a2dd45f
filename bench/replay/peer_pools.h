// Pools of several GPUs that read each other's slots, in which copies and grace periods take no time: what
// the daemon's peer tier would do with a trace. One brain has a model for each GPU, as GpuService has; a miss
// is promoted by kPromotionGainMin. Thread: one. Memory: the brain's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/residency/brain.h"

namespace moecached::replay {

class PeerPools {
 public:
  struct Outcome {
    std::uint32_t own_hits = 0, peer_hits = 0;
    std::uint32_t insertions = 0;
  };
  // A use that a peer's slot serves costs `cost` of one that is read from RAM. kInvalid: as Brain::add_model.
  [[nodiscard]] static Result<std::unique_ptr<PeerPools>> create(const ModelShape& shape,
                                                                 std::uint32_t n_gpus, double cost);
  Outcome event(std::uint32_t gpu, LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase);
  // Experts in slots of several GPUs, each copy but the first.
  [[nodiscard]] std::uint64_t copies() const;

 private:
  PeerPools(const ModelShape& shape, std::uint32_t n_gpus) : shape_(shape), n_gpus_(n_gpus) {}
  bool promote(ModelId model, LayerIndex layer, ExpertIndex expert, Phase phase);

  const ModelShape shape_;
  const std::uint32_t n_gpus_;
  Brain brain_;
  std::vector<Command> commands_;  // scratch
};

}  // namespace moecached::replay
