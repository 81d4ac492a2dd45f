// How unevenly a trace uses the experts of each layer, whatever the policy: what a small pool can hope for.
// Thread: any.
#pragma once

#include <vector>

#include "bench/replay/trace.h"
#include "daemon/residency/layer_use.h"

namespace moecached::replay {

using moecached::LayerUse;
using moecached::use_of_counts;

[[nodiscard]] std::vector<LayerUse> layer_use(const Trace& trace);

}  // namespace moecached::replay
