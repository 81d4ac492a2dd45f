#include "bench/replay/layer_use.h"

#include <algorithm>
#include <cmath>

namespace moecached::replay {

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

std::vector<LayerUse> layer_use(const Trace& trace) {
  const std::uint32_t n_layers = trace.header().n_layers, n_experts = trace.header().n_experts;
  std::vector<std::uint64_t> counts(std::size_t{n_layers} * n_experts);
  for (std::size_t row = 0; row < trace.size(); ++row) {
    for (std::uint32_t layer = 0; layer < n_layers; ++layer) {
      for (const std::uint16_t id : trace.event(row, layer)) ++counts[std::size_t{layer} * n_experts + id];
    }
  }
  std::vector<LayerUse> out;
  out.reserve(n_layers);
  for (std::uint32_t layer = 0; layer < n_layers; ++layer)
    out.push_back(use_of_counts(std::span(counts).subspan(std::size_t{layer} * n_experts, n_experts)));
  return out;
}

}  // namespace moecached::replay
