#include "bench/replay/interleave.h"

#include <string>
#include <unordered_map>

namespace moecached::replay {

Result<std::vector<Turn>> interleave(const Trace& trace, std::uint32_t n_lanes) {
  std::vector<std::vector<std::uint32_t>> rows_of(n_lanes);
  std::unordered_map<std::int64_t, std::uint32_t> lane_of;
  for (std::uint32_t row = 0; row < trace.size(); ++row) {
    const auto next = static_cast<std::uint32_t>(lane_of.size() % n_lanes);
    const auto [place, is_new] = lane_of.try_emplace(trace.row(row).seq, next);
    rows_of[n_lanes == 1 ? 0 : place->second].push_back(row);
  }
  if (lane_of.size() < n_lanes) {
    return Fault{FaultCode::kInvalid, "the trace has " + std::to_string(lane_of.size()) +
                                          " sequence(s), too few for " + std::to_string(n_lanes) +
                                          " processes: give a smaller --interleave, or a longer trace"};
  }
  std::vector<Turn> order;
  order.reserve(trace.size());
  for (std::uint32_t round = 0; order.size() < trace.size(); ++round) {
    for (std::uint32_t lane = 0; lane < n_lanes; ++lane) {
      if (round < rows_of[lane].size()) order.push_back({rows_of[lane][round], lane});
    }
  }
  return order;
}

}  // namespace moecached::replay
