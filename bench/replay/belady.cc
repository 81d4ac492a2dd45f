#include "bench/replay/belady.h"

#include "daemon/residency/belady.h"

namespace moecached::replay {

Tally BeladyResult::total() const {
  Tally sum = prefill;
  sum.add(decode);
  return sum;
}

BeladyResult replay_belady(const Trace& trace, std::span<const Turn> order, const BeladyOptions& options) {
  BeladyResult result;
  for (const Turn& turn : order) ++(trace.row(turn.row).is_decode ? result.decode : result.prefill).rows;
  std::vector<Turn> turns;
  std::vector<std::span<const std::uint16_t>> events;
  for (std::uint32_t pool = 0; pool < (options.private_pools ? options.n_lanes : 1); ++pool) {
    turns.clear();
    for (const Turn& turn : order) {
      if (!options.private_pools || turn.lane == pool) turns.push_back(turn);
    }
    for (std::uint32_t layer = 0; layer < trace.header().n_layers; ++layer) {
      events.clear();
      for (const Turn& turn : turns) events.push_back(trace.event(turn.row, layer));
      const std::vector<BeladyOutcome> outcomes =
          belady(events, trace.header().n_experts, options.n_slots[layer], options.bypass);
      for (std::size_t t = 0; t < turns.size(); ++t) {
        Tally& tally = trace.row(turns[t].row).is_decode ? result.decode : result.prefill;
        tally.lookups += events[t].size();
        tally.hits += outcomes[t].hits;
        tally.insertions += outcomes[t].insertions;
      }
    }
  }
  return result;
}

}  // namespace moecached::replay
