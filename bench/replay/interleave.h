// In which order the rows of a trace are replayed, and by which lane. One lane: as they are in the file.
// Several: its sequences are dealt to that many processes, which take turns row by row, as servers do that
// decode at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/replay/trace.h"

namespace moecached::replay {

struct Turn {
  std::uint32_t row = 0;
  std::uint32_t lane = 0;
};

// kInvalid: fewer sequences than lanes.
[[nodiscard]] Result<std::vector<Turn>> interleave(const Trace& trace, std::uint32_t n_lanes);

}  // namespace moecached::replay
