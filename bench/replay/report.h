// What a run of moecache-sim found, as a table for people, as JSON, and as advice. Pure. Thread: any.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/replay/belady.h"
#include "bench/replay/layer_use.h"
#include "bench/replay/replayer.h"
#include "bench/replay/slot_choice.h"

namespace moecached::replay {

// One policy on one pool size.
struct Run {
  std::string policy;
  SlotChoice slots;  // of the shared pool, or of all private pools together
  std::uint32_t n_lanes = 1;
  bool private_pools = false;
  ReplayResult result;
  SlotScope scope = SlotScope::kLayer;
};
// The yardstick of the same size.
struct Yardstick {
  SlotChoice slots;
  std::uint32_t n_lanes = 1;
  bool private_pools = false;
  Tally belady, bypass;
};

// One policy on GPUs that read each other's slots.
struct PeerRun {
  std::string policy;
  SlotChoice slots;  // of each GPU
  std::uint32_t n_gpus = 1;
  PeerResult result;
};

struct Report {
  TraceHeader header;
  std::string path;
  std::uint64_t n_rows = 0;
  std::uint32_t n_sequences = 0;
  Mode mode = Mode::kPool;
  bool prefetch = false;           // was asked for
  std::uint64_t expert_bytes = 0;  // 0: not known, link figures are in experts
  std::vector<Run> runs;
  std::vector<Yardstick> yardsticks;
  std::vector<PeerRun> peers;      // only when they were asked for
  std::vector<LayerUse> use;       // only when layers were asked for
  std::vector<std::string> notes;  // what could not be run, and why
  [[nodiscard]] const Yardstick* yardstick_of(const Run& run) const;
};

[[nodiscard]] double share(std::uint64_t part, std::uint64_t whole);  // 0 of nothing
// What to change about the pool, from the sizes that were run: slots for fewer than two tokens, and slots
// past the knee of the curve.
[[nodiscard]] std::vector<std::string> advice(const Report& report);
[[nodiscard]] std::string to_table(const Report& report);
[[nodiscard]] nlohmann::ordered_json to_json(const Report& report);

}  // namespace moecached::replay
