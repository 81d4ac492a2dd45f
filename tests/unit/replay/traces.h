// Traces that tests make.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "bench/replay/trace.h"

namespace moecached::replay {

struct RandomTrace {
  std::uint32_t n_layers = 1, n_experts = 8, k = 2, n_rows = 100, n_sequences = 1;
  std::uint32_t seed = 1;
  std::uint32_t prefill_every = 4;  // that row is a prompt's, which evicts nothing of decode's; 0: none is
};

// Skewed and sticky, so that policies differ; some ids are missing.
inline Trace make_trace(const RandomTrace& wanted) {
  TraceHeader header;
  header.n_layers = wanted.n_layers;
  header.n_experts = wanted.n_experts;
  header.k = header.n_used = wanted.k;
  Trace trace(std::move(header));
  std::mt19937 random(wanted.seed);
  std::vector<std::uint16_t> before(std::size_t{wanted.n_layers} * wanted.k, Trace::kNone), ids;
  for (std::uint32_t row = 0; row < wanted.n_rows; ++row) {
    ids.clear();
    for (std::uint32_t layer = 0; layer < wanted.n_layers; ++layer) {
      const std::size_t first = ids.size();
      for (std::uint32_t i = 0; i < wanted.k; ++i) {
        std::uint16_t id = before[first + i];
        if (id == Trace::kNone || random() % 2 == 0)
          id = static_cast<std::uint16_t>(std::min(random() % wanted.n_experts, random() % wanted.n_experts));
        const bool taken =
            std::find(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), id) != ids.end();
        ids.push_back(taken || random() % 16 == 0 ? Trace::kNone : id);
      }
    }
    before = ids;
    const TraceRow place{static_cast<std::int64_t>(row * wanted.n_sequences / wanted.n_rows), row,
                         wanted.prefill_every == 0 || row % wanted.prefill_every != 0};
    if (!trace.add(place, ids)) std::abort();
  }
  return trace;
}

}  // namespace moecached::replay
