// All tiers in one string, each with its policy and its sizes:
//
//   GPU:slru:128,RAM:lfu:halve=64:25%:8GiB,SSD:stream
//
//   GPU:POLICY[:SIZE...]   gpu.policy, gpu.slots, gpu.bytes, gpu.keep_free. Not named: no GPU is served
//   RAM:POLICY[:SIZE...][:SCOPE]  policy.default, pool.slots, pool.bytes, pool.scope. Not named: as the other
//                          settings say.
//                          Behind the policy also prefetch=off or prefetch=auto: pool.prefetch
//   SSD:stream[:SIZE]      stream.bytes. Always there: experts come from the model's file
//
// SIZE: 128 slots of each layer, 25% of its experts, auto, 8GiB of memory, or free-1GiB: what is free less
// that. One of slots, one of memory; a GPU takes memory and free- together. SCOPE: layer or global. Names in
// any case. It is another way to write the settings it names, which keep their limits, and knows nothing that
// they do not. Thread: any.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"

namespace moecached {

struct TierSetting {
  std::string_view key;  // "gpu.slots"
  std::string value;     // as its setting takes it
};

// Every setting of the tiers that are named, also those that the string leaves to their defaults; gpu.devices
// is "auto" or "none". kInvalid: the text names the part and what to write instead. Whether a value is
// allowed is for its setting to say.
[[nodiscard]] Result<std::vector<TierSetting>> parse_tiers(std::string_view text);

// In full: every tier that is served, with all its sizes. Parses back to the same settings.
[[nodiscard]] std::string print_tiers(const Config& config);

}  // namespace moecached
