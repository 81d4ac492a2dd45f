// What a policy that knows the future would do with one layer, as the yardstick for those that do not.
// Event-atomic: ids of an event are looked up together, against the state before it.
//   mandatory  every miss must be loaded (pool mode): out go the experts whose next use is farthest, those of
//              the event itself excepted. L. A. Belady, "A study of replacement algorithms for a
//              virtual-storage computer", IBM Systems Journal 5(2), 1966.
//   bypass     a miss may be left where it is (covered mode): of what is resident and what was just asked
//              for, those with the nearest next use stay. Fewest misses, not fewest uploads; what is never
//              used again is not uploaded.
// Pure. Thread: any. Memory: four bytes an id, and a few an expert.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moecached {

struct BeladyOutcome {  // of one event
  std::uint32_t hits = 0;
  std::uint32_t insertions = 0;
};

// events: distinct ids below n_experts each, in order. One outcome an event.
[[nodiscard]] std::vector<BeladyOutcome> belady(std::span<const std::span<const std::uint16_t>> events,
                                                std::uint32_t n_experts, std::uint32_t n_slots, bool bypass);

}  // namespace moecached
