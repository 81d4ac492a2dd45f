#include "daemon/residency/belady.h"

#include <algorithm>

namespace moecached {
namespace {

constexpr std::uint32_t kNever = UINT32_MAX;
using Events = std::span<const std::span<const std::uint16_t>>;

class Oracle {
 public:
  Oracle(Events events, std::uint32_t n_experts)
      : events_(events), next_(n_experts, kNever), is_resident_(n_experts), in_event_(n_experts) {}

  std::vector<BeladyOutcome> run(std::uint32_t n_slots, bool bypass) {
    look_ahead();
    std::fill(next_.begin(), next_.end(), kNever);
    std::vector<BeladyOutcome> outcomes(events_.size());
    std::size_t at = 0;
    for (std::size_t t = 0; t < events_.size(); ++t) {
      const std::span<const std::uint16_t> event = events_[t];
      missing_.clear();
      for (const std::uint16_t id : event) {
        next_[id] = next_uses_[at++];
        if (is_resident_[id] == 0) missing_.push_back(id);
      }
      outcomes[t].hits = static_cast<std::uint32_t>(event.size() - missing_.size());
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
        ++outcomes[t].insertions;
      }
      for (const std::uint16_t id : event) in_event_[id] = 0;
    }
    return outcomes;
  }

 private:
  // When each id of each event is used again: the position of that event.
  void look_ahead() {
    std::size_t n = 0;
    for (const auto& event : events_) n += event.size();
    next_uses_.resize(n);
    for (std::size_t t = events_.size(); t-- > 0;) {
      const std::span<const std::uint16_t> event = events_[t];
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

  const Events events_;
  std::vector<std::uint32_t> next_;       // by expert: its next use, as of the event
  std::vector<std::uint32_t> next_uses_;  // by id, in the order of the events
  std::vector<std::uint16_t> residents_, missing_;
  std::vector<std::uint8_t> is_resident_, in_event_;
};

}  // namespace

std::vector<BeladyOutcome> belady(Events events, std::uint32_t n_experts, std::uint32_t n_slots,
                                  bool bypass) {
  return Oracle(events, n_experts).run(n_slots, bypass);
}

}  // namespace moecached
