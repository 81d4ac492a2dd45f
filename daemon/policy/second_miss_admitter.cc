#include "daemon/policy/second_miss_admitter.h"

namespace moecached {

SecondMissAdmitter::SecondMissAdmitter(PolicyShape shape)
    : n_names_(shape.n_slots),
      names_(shape.n_experts),
      first_miss_(shape.n_experts),
      last_miss_(shape.n_experts) {}

void SecondMissAdmitter::note(ExpertIndex expert, Step step) noexcept {
  // Names are dropped when a new step begins, never within one: which experts of a step count as known must
  // not depend on the order in which they are reported.
  if (step > now_) {
    while (names_.size() > n_names_) names_.erase(names_.front());
    now_ = step;
  }
  if (names_.contains(expert)) {
    if (last_miss_[expert.value] >= step) return;
    names_.erase(expert);
  } else {
    first_miss_[expert.value] = step;
  }
  last_miss_[expert.value] = step;
  names_.insert_from_back(expert, static_cast<RecencyList::Key>(step));
}

bool SecondMissAdmitter::admits(ExpertIndex newcomer, Step step) noexcept {
  note(newcomer, step);
  if (first_miss_[newcomer.value] >= step) return false;
  names_.erase(newcomer);
  return true;
}

bool SecondMissAdmitter::is_worth(ExpertIndex newcomer, ExpertIndex) const noexcept {
  return names_.contains(newcomer) && first_miss_[newcomer.value] < last_miss_[newcomer.value];
}

}  // namespace moecached
