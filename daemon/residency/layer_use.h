// How unevenly the experts of a layer are used, whatever the policy: what a small pool can hope for. Pure.
// Thread: any.
#pragma once

#include <cstdint>
#include <span>

namespace moecached {

struct LayerUse {
  std::uint64_t lookups = 0;
  std::uint32_t n_used = 0;  // experts that were used at all
  double gini = 0;           // of the use counts: 0 all alike, towards 1 a few have everything
  double entropy_bits = 0;   // of the use shares; at most log2(experts)
};

[[nodiscard]] LayerUse use_of_counts(std::span<const std::uint64_t> counts);

}  // namespace moecached
