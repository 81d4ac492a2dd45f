// Uses per step of every expert of a layer, resident or not, as an exponentially weighted moving average:
// each step weighs `decay` times the next. Not a policy: ewma, admission and the access history share it.
// Thread: core loop. Memory: one entry per expert, sized at construction, never grows.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/policy/eviction_policy.h"

namespace moecached {

class UseRates {
 public:
  UseRates(std::uint32_t n_experts, double decay);  // 0 < decay < 1

  // Counts once per step; what is older than the expert's last use is known already.
  void use(ExpertIndex expert, Step step) noexcept;
  void seed(std::span<const PastUse> past, Step now) noexcept;

  [[nodiscard]] double rate(ExpertIndex expert) const noexcept {  // 0..1, at the newest step seen
    return faded(averages_[expert.value], now_);
  }
  // The same, less the use of that very step: what is known when a step begins, however much of it was
  // reported.
  [[nodiscard]] double rate_before_now(ExpertIndex expert) const noexcept {
    const Average& average = averages_[expert.value];
    return faded(average, now_) - (average.last_step == now_ && now_ != 0 ? 1 - decay_ : 0);
  }
  [[nodiscard]] Step last_step(ExpertIndex expert) const noexcept {
    return averages_[expert.value].last_step;
  }
  [[nodiscard]] Step now() const noexcept { return now_; }
  [[nodiscard]] double decay() const noexcept { return decay_; }

 private:
  struct Average {
    double value = 0;  // at `step`
    Step step = 0;
    Step last_step = 0;  // of a use; differs from `step` where the rate was seeded
  };
  [[nodiscard]] double faded(const Average& average, Step now) const noexcept;

  double decay_;
  std::array<double, 256> powers_{};  // of decay_
  Step now_ = 0;
  std::vector<Average> averages_;
};

}  // namespace moecached
