#include "daemon/residency/prefetch_switch.h"

#include <algorithm>

namespace moecached {
namespace {

constexpr std::uint64_t kEventsBetweenLooks = 64;

}  // namespace

const char* name_of(PrefetchState state) {
  static constexpr const char* kNames[] = {"off", "learning", "probing", "on", "paused"};
  return kNames[static_cast<std::size_t>(state)];
}

bool PrefetchSwitch::count_event() { return ++n_events_ % kEventsBetweenLooks == 0; }

void PrefetchSwitch::judge(const LayerCounters& sum) {
  const auto become = [&](PrefetchState state) {
    state_ = state;
    n_events_ = 0;
    window_start_ = sum;
  };
  if (state_ == PrefetchState::kPaused) {
    if (n_events_ >= pause_ * n_layers_) become(PrefetchState::kLearning);
    return;
  }
  if (state_ == PrefetchState::kLearning) {
    if (n_events_ >= pace_.learn_tokens * n_layers_) become(PrefetchState::kProbing);
    return;
  }
  const auto grown = [&](std::uint64_t LayerCounters::*counter) {
    return static_cast<std::int64_t>(sum.*counter - window_start_.*counter);
  };
  const std::int64_t used = grown(&LayerCounters::prefetch_used);
  const std::int64_t late = grown(&LayerCounters::prefetch_late);
  const std::int64_t wasted = grown(&LayerCounters::prefetch_wasted);
  if (used + late + wasted < std::int64_t{pace_.window}) return;
  const std::int64_t gain = 4 * used + late - wasted - 4 * grown(&LayerCounters::prefetch_regretted);
  // A probe must bring half a miss for each prefetch; going on needs none.
  if (gain >= (state_ == PrefetchState::kProbing ? 2 * std::int64_t{pace_.window} : 0)) {
    pause_ = 0;
    become(PrefetchState::kOn);
    return;
  }
  pause_ = std::clamp<std::uint64_t>(pause_ * 2, pace_.pause_tokens_min, pace_.pause_tokens_max);
  become(PrefetchState::kPaused);
}

}  // namespace moecached
