// daemon/residency/belady.h over a whole trace: every layer of every pool. Thread: one. Memory: 20 bytes an
// id of one layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/replay/interleave.h"
#include "bench/replay/replayer.h"

namespace moecached::replay {

struct BeladyOptions {
  bool bypass = false;
  std::vector<std::uint32_t> n_slots;  // of each pool, by layer
  std::uint32_t n_lanes = 1;
  bool private_pools = false;
};

struct BeladyResult {
  Tally prefill, decode;
  [[nodiscard]] Tally total() const;
};

[[nodiscard]] BeladyResult replay_belady(const Trace& trace, std::span<const Turn> order,
                                         const BeladyOptions& options);

}  // namespace moecached::replay
