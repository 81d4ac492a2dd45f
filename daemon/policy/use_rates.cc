#include "daemon/policy/use_rates.h"

#include <algorithm>
#include <cmath>

namespace moecached {

UseRates::UseRates(std::uint32_t n_experts, double decay) : decay_(decay), averages_(n_experts) {
  for (std::size_t i = 0; i < powers_.size(); ++i) powers_[i] = std::pow(decay, static_cast<double>(i));
}

double UseRates::faded(const Average& average, Step now) const noexcept {
  const Step steps = now - average.step;
  return average.value *
         (steps < powers_.size() ? powers_[steps] : std::pow(decay_, static_cast<double>(steps)));
}

void UseRates::use(ExpertIndex expert, Step step) noexcept {
  now_ = std::max(now_, step);
  Average& average = averages_[expert.value];
  if (average.step >= step && average.step != 0) return;
  average.value = faded(average, step) + (1 - decay_);
  average.step = step;
  average.last_step = step;
}

void UseRates::seed(std::span<const PastUse> past, Step now) noexcept {
  now_ = std::max(now_, now);
  const std::size_t n = std::min(past.size(), averages_.size());
  for (std::size_t i = 0; i < n; ++i) {
    averages_[i] = {
        .value = std::clamp(past[i].uses_per_step, 0.0, 1.0), .step = now, .last_step = past[i].last_step};
  }
}

}  // namespace moecached
