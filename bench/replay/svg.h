// Hit-rate curves as one SVG: a line a policy over the share of experts that have slots, the two yardsticks
// dashed. Pure. Thread: any.
#pragma once

#include <string>

#include "bench/replay/report.h"

namespace moecached::replay {

// Runs of several processes on private pools are left out. Follows the viewer's light or dark setting.
[[nodiscard]] std::string to_svg(const Report& report);

}  // namespace moecached::replay
