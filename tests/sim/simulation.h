// One seeded run of the real Brain among fake lanes, memory, disk and chance. The same options give the same
// run, step by step. A violation is reported, not thrown; a failed CHECK in the Brain aborts the process (the
// test prints the seed then too).
#pragma once

#include <cstdint>
#include <string>

#include "tests/sim/sim_options.h"
#include "tests/sim/world.h"

namespace moecached::sim {

struct SimReport {
  std::uint64_t trace_hash = 0;
  ViolationKind violation = ViolationKind::kNone;
  std::string text;   // of the violation
  std::string trace;  // the last lines, when options.keep_trace_text
  Stats stats;
};

[[nodiscard]] SimReport simulate(const SimOptions& options);

}  // namespace moecached::sim
