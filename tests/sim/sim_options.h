// What one simulation is like: shapes and faults. Every fault is an option; a seed draws its own mixture, so
// that a few thousand seeds cover combinations as well as each fault alone.
#pragma once

#include <cstdint>

namespace moecached::sim {

struct SimOptions {
  std::uint64_t seed = 1;
  std::uint32_t ticks =
      3000;  // atomic actions of lanes, shell, disk and chance; then everything must come to rest
  bool keep_trace_text = false;

  std::uint32_t n_models = 2;
  std::uint32_t n_lanes = 4;
  std::uint32_t n_layers_max = 3;
  std::uint32_t n_experts_min = 1, n_experts_max = 12;
  std::uint32_t n_slots_max = UINT32_MAX;
  std::uint32_t all_layers_permille = 0;  // of the lanes: use every layer in one epoch, as graphs on a GPU do
  std::uint32_t command_batch = 1;        // up to so many events before the shell carries out their commands

  // Faults.
  std::uint32_t read_delay_ticks_max = 5;    // reads end in any order within it
  std::uint32_t read_error_permille = 0;     // of reads
  std::uint32_t model_changed_permille = 0;  // of reads
  std::uint32_t duplicate_permille = 0;      // of completions: reported once more
  std::uint32_t death_permille = 0;          // of ticks: some lane's process dies, at whatever step it is
  std::uint32_t stall_permille = 0;          // of ticks: some lane stops for a while, its epoch open
  std::uint32_t long_stall_permille = 0;     // of ticks: some lane within an epoch stops for long
  std::uint32_t long_stall_ticks_max = 3000;
  std::uint32_t stall_after_ticks = 60;    // that others wait for a lane before they go on without it
  std::uint32_t close_permille = 0;        // of ticks: some lane at rest closes in good order
  std::uint32_t policy_swap_permille = 0;  // of ticks
  std::uint32_t model_removal_permille =
      0;                            // of ticks: its lanes die, it goes, another comes; completions are late
  std::uint32_t liar_permille = 0;  // of the lanes: lease and complete whatever they like

  std::uint32_t promote_permille = 0;  // of ticks: an expert that nobody leased is loaded, victim or not

  std::uint32_t trade_permille = 0;  // of ticks: a slot is moved from any layer to any other; > 0: behind
                                     // leases also where the routing says
  // Of ticks: the bytes of a resident expert are found to be wrong.
  std::uint32_t corrupt_permille = 0;
  // Models are one on several GPUs: alike, and of ticks: one of them is told of other peers.
  std::uint32_t peers_permille = 0;
  // Models prefetch, and lanes mostly go through the layers in order with experts that follow from each
  // other.
  bool prefetch = false;

  // Models have device slots: behind records of decode an expert may move up. No trades, no peers.
  std::uint32_t rise_permille = 0;
  std::uint32_t n_spares = 2;
  std::uint32_t copy_delay_ticks_max = 5;

  // Canaries: faults of the shell that the simulation must find.
  bool skip_grace = false;          // slots are reused while lanes still read them
  bool skip_grace_of_fall = false;  // only device slots are, which an expert falls from
  bool skip_grace_of_rise = false;  // only RAM slots are, which an expert has risen from
  bool lose_completions = false;    // some reads never report
  bool stalled_is_gone = false;     // a stalled lane is not waited for any longer
  bool keep_released = false;       // memory of a closed slot is never given back
};

[[nodiscard]] SimOptions options_of_seed(std::uint64_t seed);

}  // namespace moecached::sim
