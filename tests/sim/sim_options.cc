#include "tests/sim/sim_options.h"

#include <algorithm>

#include "tests/sim/rng.h"

namespace moecached::sim {

SimOptions options_of_seed(std::uint64_t seed) {
  // Another stream than the simulation's own: a new option must not change what an old seed does next.
  Rng rng(seed ^ UINT64_C(0x5eed0f0b71095));
  const auto sometimes = [&](std::uint32_t value) { return rng.below(2) == 0 ? 0 : rng.below(value) + 1; };
  SimOptions options;
  options.seed = seed;
  options.n_models = rng.between(1, 3);
  options.n_lanes = rng.between(1, 7);
  options.n_layers_max = rng.between(1, 4);
  options.n_experts_max = rng.between(1, 16);
  options.all_layers_permille = sometimes(400);
  options.command_batch = rng.below(3) == 0 ? rng.between(2, 6) : 1;
  options.read_delay_ticks_max = rng.below(2) == 0 ? 3 : rng.between(10, 200);
  options.read_error_permille = sometimes(200);
  options.model_changed_permille = sometimes(60);
  options.duplicate_permille = sometimes(300);
  options.death_permille = sometimes(12);
  options.stall_permille = sometimes(12);
  options.close_permille = sometimes(8);
  options.policy_swap_permille = sometimes(10);
  options.model_removal_permille = sometimes(4);
  options.liar_permille = sometimes(250);
  options.long_stall_permille = sometimes(8);
  options.stall_after_ticks = rng.between(10, 200);
  options.promote_permille = sometimes(300);
  options.trade_permille = sometimes(200);
  options.prefetch = rng.below(3) == 0;
  if (options.prefetch) {  // it takes tokens to learn something
    options.ticks *= 3;
    options.n_models = 1;
    options.n_experts_min = std::min(options.n_experts_max, 6u);
  } else if (rng.below(4) == 0) {
    options.peers_permille = rng.between(1, 50);
    options.n_models = 1u << rng.between(1, 3);
    options.promote_permille = std::max(options.promote_permille, 50u);
  }
  if (options.peers_permille == 0 && rng.below(3) == 0) {
    options.trade_permille = 0;
    options.rise_permille = rng.between(50, 1000);
    options.n_spares = rng.between(1, 3);
    options.copy_delay_ticks_max = rng.below(2) == 0 ? 3 : rng.between(10, 200);
    options.long_stall_permille = std::max(options.long_stall_permille, rng.below(8));
  }
  options.corrupt_permille = sometimes(60);
  return options;
}

}  // namespace moecached::sim
