// What a policy that knows the future would do, as the yardstick for those that do not. Event-atomic like the
// replay.
//   mandatory  every miss must be loaded (pool mode): out go the experts whose next use is farthest, those of
//              the event itself excepted. L. A. Belady, "A study of replacement algorithms for a
//              virtual-storage computer", IBM Systems Journal 5(2), 1966.
//   bypass     a miss may be left where it is (covered mode): of what is resident and what was just asked
//   for,
//              those with the nearest next use stay. Fewest misses, not fewest uploads; what is never used
//              again is not uploaded.
// Thread: one. Memory: four bytes an id of one layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/replay/interleave.h"
#include "bench/replay/replayer.h"

namespace moecached::replay {

struct BeladyOptions {
  bool bypass = false;
  std::vector<std::uint32_t> n_slots;  // of each pool, by layer
  std::uint32_t n_lanes = 1;
  bool private_pools = false;
};

struct BeladyResult {
  Tally prefill, decode;
  [[nodiscard]] Tally total() const;
};

[[nodiscard]] BeladyResult replay_belady(const Trace& trace, std::span<const Turn> order,
                                         const BeladyOptions& options);

}  // namespace moecached::replay
