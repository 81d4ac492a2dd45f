#include "bench/replay/belady.h"

#include <algorithm>

namespace moecached::replay {
namespace {

constexpr std::uint32_t kNever = UINT32_MAX;

// One layer of one pool.
class Oracle {
 public:
  Oracle(const Trace& trace, std::span<const Turn> turns, std::uint32_t layer)
      : trace_(trace), turns_(turns), layer_(layer), next_(trace.header().n_experts, kNever) {}

  void run(std::uint32_t n_slots, bool bypass, BeladyResult* result) {
    look_ahead();
    std::fill(next_.begin(), next_.end(), kNever);
    is_resident_.assign(next_.size(), 0);
    in_event_.assign(next_.size(), 0);
    residents_.clear();
    std::size_t at = 0;
    for (const Turn& turn : turns_) {
      const std::span<const std::uint16_t> event = trace_.event(turn.row, layer_);
      Tally& tally = trace_.row(turn.row).is_decode ? result->decode : result->prefill;
      tally.lookups += event.size();
      missing_.clear();
      for (const std::uint16_t id : event) {
        next_[id] = next_uses_[at++];
        if (is_resident_[id] == 0) missing_.push_back(id);
      }
      tally.hits += event.size() - missing_.size();
      if (missing_.empty() || (!bypass && event.size() > n_slots)) continue;
      if (bypass) {
        std::sort(missing_.begin(), missing_.end(),
                  [this](std::uint16_t a, std::uint16_t b) { return next_[a] < next_[b]; });
      } else {
        for (const std::uint16_t id : event) in_event_[id] = 1;
      }
      for (const std::uint16_t id : missing_) {
        if (bypass && next_[id] == kNever) break;
        if (residents_.size() >= n_slots) {
          const std::size_t victim = farthest();
          if (bypass && next_[residents_[victim]] <= next_[id]) break;
          is_resident_[residents_[victim]] = 0;
          residents_[victim] = id;
        } else {
          residents_.push_back(id);
        }
        is_resident_[id] = 1;
        ++tally.insertions;
      }
      for (const std::uint16_t id : event) in_event_[id] = 0;
    }
  }

 private:
  // When each id of each event is used again: the position of that turn.
  void look_ahead() {
    std::size_t n = 0;
    for (const Turn& turn : turns_) n += trace_.event(turn.row, layer_).size();
    next_uses_.resize(n);
    for (std::size_t t = turns_.size(); t-- > 0;) {
      const std::span<const std::uint16_t> event = trace_.event(turns_[t].row, layer_);
      n -= event.size();
      for (std::size_t i = 0; i < event.size(); ++i) {
        next_uses_[n + i] = next_[event[i]];
        next_[event[i]] = static_cast<std::uint32_t>(t);
      }
    }
  }
  // Place in residents_ of the one whose next use is farthest, none of the event.
  [[nodiscard]] std::size_t farthest() const {
    std::size_t best = residents_.size();
    for (std::size_t i = 0; i < residents_.size(); ++i) {
      if (in_event_[residents_[i]] != 0) continue;
      if (best == residents_.size() || next_[residents_[i]] > next_[residents_[best]]) best = i;
    }
    return best;
  }

  const Trace& trace_;
  const std::span<const Turn> turns_;
  const std::uint32_t layer_;
  std::vector<std::uint32_t> next_;       // by expert: its next use, as of the turn
  std::vector<std::uint32_t> next_uses_;  // by id, in the order of the turns
  std::vector<std::uint16_t> residents_, missing_;
  std::vector<std::uint8_t> is_resident_, in_event_;
};

}  // namespace

Tally BeladyResult::total() const {
  Tally sum = prefill;
  sum.add(decode);
  return sum;
}

BeladyResult replay_belady(const Trace& trace, std::span<const Turn> order, const BeladyOptions& options) {
  BeladyResult result;
  for (const Turn& turn : order) ++(trace.row(turn.row).is_decode ? result.decode : result.prefill).rows;
  std::vector<Turn> turns;
  for (std::uint32_t pool = 0; pool < (options.private_pools ? options.n_lanes : 1); ++pool) {
    turns.clear();
    for (const Turn& turn : order) {
      if (!options.private_pools || turn.lane == pool) turns.push_back(turn);
    }
    for (std::uint32_t layer = 0; layer < trace.header().n_layers; ++layer)
      Oracle(trace, turns, layer).run(options.n_slots[layer], options.bypass, &result);
  }
  return result;
}

}  // namespace moecached::replay
