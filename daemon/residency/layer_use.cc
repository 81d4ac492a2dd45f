#include "daemon/residency/layer_use.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moecached {

LayerUse use_of_counts(std::span<const std::uint64_t> counts) {
  LayerUse use;
  std::vector<std::uint64_t> sorted(counts.begin(), counts.end());
  std::sort(sorted.begin(), sorted.end());
  for (const std::uint64_t count : sorted) {
    use.lookups += count;
    use.n_used += count > 0 ? 1 : 0;
  }
  if (use.lookups == 0) return use;
  const auto n = static_cast<double>(sorted.size()), total = static_cast<double>(use.lookups);
  double weighted = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto count = static_cast<double>(sorted[i]);
    weighted += static_cast<double>(i + 1) * count;
    if (count > 0) use.entropy_bits -= count / total * std::log2(count / total);
  }
  use.gini = 2 * weighted / (n * total) - (n + 1) / n;
  return use;
}

}  // namespace moecached
