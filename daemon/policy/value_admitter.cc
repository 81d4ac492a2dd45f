#include "daemon/policy/value_admitter.h"

#include <algorithm>
#include <cmath>

namespace moecached {

ValueAdmitter::ValueAdmitter(PolicyShape shape)
    : n_slots_(shape.n_slots), rates_(shape.n_experts, kDecay), admitted_(shape.n_experts) {}

double ValueAdmitter::stay_steps() const noexcept {
  const double look_back = 1 / (1 - kDecay);
  const double inserts =
      inserts_ * std::pow(kDecay, static_cast<double>(rates_.now() - std::min(rates_.now(), insert_step_)));
  return std::min(look_back, n_slots_ / std::max(inserts, 1e-9));
}

double ValueAdmitter::gain_min() const noexcept {
  const double saved = costs_.miss_ns * stay_steps();
  return costs_.upload_ns * std::clamp(costs_.link_busy, 0.0, 1.0) / std::max(saved, 1e-9);
}

bool ValueAdmitter::is_worth(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return rates_.rate(newcomer) - rates_.rate(victim) > gain_min();
}

bool ValueAdmitter::is_above_the_lowest(ExpertIndex expert) const noexcept {
  const double rate = rates_.rate(expert);
  // As of the beginning of the step: its experts are simultaneous.
  for (std::uint32_t i = 0; i < admitted_.size(); ++i) {
    if (admitted_[i] == 0 || admitted_[i] == rates_.now() + 1) continue;
    if (rate > rates_.rate_before_now(ExpertIndex(i))) return true;
  }
  return false;
}

bool ValueAdmitter::admits(ExpertIndex newcomer, Step step) noexcept {
  if (rates_.last_step(newcomer) == 0) rates_.use(newcomer, step);
  if (step != insert_step_) {
    if (step > insert_step_) inserts_ *= std::pow(kDecay, static_cast<double>(step - insert_step_));
    insert_step_ = std::max(insert_step_, step);
    // Of a whole step at once, whichever of its experts is reported first.
    is_contested_ = n_freed_ > 0;
  }
  inserts_ += 1 - kDecay;
  if (n_freed_ > 0) --n_freed_;
  const bool admitted = !is_contested_ || is_above_the_lowest(newcomer);
  admitted_[newcomer.value] = admitted ? rates_.now() + 1 : 0;
  return admitted;
}

bool ValueAdmitter::admits_guest(ExpertIndex guest) noexcept {
  const bool admitted = is_above_the_lowest(guest);
  admitted_[guest.value] = admitted ? rates_.now() + 1 : 0;
  return admitted;
}

// A place that went with its slot is not going to be filled.
void ValueAdmitter::set_slots(std::uint32_t n_slots) noexcept {
  if (n_slots < n_slots_) n_freed_ -= std::min(n_freed_, n_slots_ - n_slots);
  n_slots_ = n_slots;
}

void ValueAdmitter::on_remove(ExpertIndex expert) noexcept {
  admitted_[expert.value] = 0;
  n_freed_ = std::min(n_freed_ + 1, n_slots_);
}

}  // namespace moecached
