// How many slots a replay has: "25%" of each layer's experts, "8" of each layer, or "recorded", as the daemon
// had them when it recorded the trace. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/replay/trace.h"

namespace moecached::replay {

struct SlotChoice {
  std::string label;
  double share = 0;                    // of all experts
  std::vector<std::uint32_t> n_slots;  // by layer
};

// "12.5%,25%,8": kInvalid names the item.
[[nodiscard]] Result<std::vector<SlotChoice>> parse_slots(std::string_view text, const TraceHeader& header);
// The slots of one of n private pools that together have what `all` has; empty when some layer's part could
// not hold the experts of one token.
[[nodiscard]] std::vector<std::uint32_t> private_part(const SlotChoice& all, std::uint32_t n_pools,
                                                      const TraceHeader& header);

}  // namespace moecached::replay
