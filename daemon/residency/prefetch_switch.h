// Whether prefetching pays for one model, judged by what became of what was started. In quarters of a miss
// that nobody has to wait for:
//
//   used in time      +4   a miss less
//   late              +1   the read was under way, the rest of it is waited for: the disk does not keep up
//   wasted            -1   a read that may have held up others, and a slot for a while
//   regretted         -4   a miss more, of what had to go
//
// Judged over windows of prefetches that have ended. A sum below zero pauses it: nothing is predicted
// or learnt. Then, as in the beginning, it learns for a while, and probes: a window that must bring more than
// that to go on, else the next pause is twice as long. Counts events, not time, so that a replay decides as
// the daemon did. Pure. Thread: core loop. Memory: itself.
#pragma once

#include <cstdint>

#include "daemon/residency/brain.h"

namespace moecached {

class PrefetchSwitch {
 public:
  PrefetchSwitch(std::uint32_t n_layers, const PrefetchPace& pace) : n_layers_(n_layers), pace_(pace) {}

  // A decode event of one layer of the model. Returns whether it is time to judge.
  [[nodiscard]] bool count_event();
  // What has happened since the model was added; of LayerCounters, its prefetch counters alone.
  void judge(const LayerCounters& sum);
  [[nodiscard]] PrefetchState state() const { return state_; }  // never kOff
  [[nodiscard]] bool learns() const { return state_ != PrefetchState::kPaused; }
  [[nodiscard]] bool may_start() const { return learns() && state_ != PrefetchState::kLearning; }

 private:
  const std::uint64_t n_layers_;
  const PrefetchPace pace_;
  PrefetchState state_ = PrefetchState::kLearning;
  std::uint64_t n_events_ = 0;  // in this state
  std::uint64_t pause_ = 0;     // in tokens: this one, or the latest since it paid
  LayerCounters window_start_;
};

}  // namespace moecached
