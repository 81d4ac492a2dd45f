// How unevenly a trace uses the experts of each layer, whatever the policy: what a small pool can hope for.
// Thread: any.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/replay/trace.h"

namespace moecached::replay {

struct LayerUse {
  std::uint64_t lookups = 0;
  std::uint32_t n_used = 0;  // experts that were used at all
  double gini = 0;           // of the use counts: 0 all alike, towards 1 a few have everything
  double entropy_bits = 0;   // of the use shares; at most log2(experts)
};

[[nodiscard]] LayerUse use_of_counts(std::span<const std::uint64_t> counts);
[[nodiscard]] std::vector<LayerUse> layer_use(const Trace& trace);

}  // namespace moecached::replay
