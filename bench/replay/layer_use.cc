#include "bench/replay/layer_use.h"

#include <cstdint>
#include <span>

namespace moecached::replay {

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
