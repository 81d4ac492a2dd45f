#include "daemon/policy/admission.h"

#include <array>
#include <utility>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"
#include "daemon/policy/second_miss_admitter.h"
#include "daemon/policy/value_admitter.h"

namespace moecached {

Result<AdmissionSplit> split_admission(std::string_view policy, std::string_view options) {
  static constexpr std::array<std::string_view, 3> kWords = {"always", "second-miss", "value"};
  Result<PolicyOptions> parsed = PolicyOptions::parse(policy, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::size_t> admit = parsed->word(PolicyOptions::kAdmit, kWords);
  if (!admit) return admit.error();
  return AdmissionSplit{.admission = static_cast<Admission>(*admit),
                        .policy_options = parsed->without(PolicyOptions::kAdmit)};
}

std::unique_ptr<EvictionPolicy> with_admission(Admission admission, PolicyShape shape,
                                               std::unique_ptr<EvictionPolicy> policy) {
  std::unique_ptr<Admitter> admitter;
  if (admission == Admission::kAlways) return policy;
  if (admission == Admission::kSecondMiss) admitter = std::make_unique<SecondMissAdmitter>(shape);
  if (admission == Admission::kValue) admitter = std::make_unique<ValueAdmitter>(shape);
  return std::make_unique<AdmissionPolicy>(shape, std::move(admitter), std::move(policy));
}

AdmissionPolicy::AdmissionPolicy(PolicyShape shape, std::unique_ptr<Admitter> admitter,
                                 std::unique_ptr<EvictionPolicy> policy)
    : admitter_(std::move(admitter)),
      policy_(std::move(policy)),
      guests_(shape.n_experts),
      inserted_(shape.n_experts),
      marks_(shape.n_experts) {
  known_.reserve(shape.n_experts);
}

void AdmissionPolicy::on_miss(ExpertIndex expert, Step step) noexcept {
  admitter_->on_miss(expert, step);
  policy_->on_miss(expert, step);
}

void AdmissionPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  inserted_[expert.value] = step;
  if (admitter_->admits(expert, step)) {
    policy_->on_insert(expert, step);
  } else {
    guests_.insert_from_front(expert, -1 - static_cast<RecencyList::Key>(step));
  }
}

void AdmissionPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  admitter_->on_access(expert, step);
  if (guests_.contains(expert)) {
    // Used in the step that it came in with: the same event.
    if (step == inserted_[expert.value]) return;
    // The policy begins the step before it hears of an older one.
    policy_->on_miss(expert, step);
    if (!admitter_->admits_guest(expert)) return;
    guests_.erase(expert);
    policy_->on_insert(expert, inserted_[expert.value]);
  }
  policy_->on_access(expert, step);
}

void AdmissionPolicy::on_remove(ExpertIndex expert) noexcept {
  admitter_->on_remove(expert);
  if (guests_.contains(expert)) {
    guests_.erase(expert);
  } else {
    policy_->on_remove(expert);
  }
}

void AdmissionPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  admitter_->seed(past, now);
  policy_->seed(past, now);
}

void AdmissionPolicy::set_costs(const PolicyCosts& costs) noexcept {
  admitter_->set_costs(costs);
  policy_->set_costs(costs);
}

void AdmissionPolicy::set_slots(std::uint32_t n_slots) noexcept {
  admitter_->set_slots(n_slots);
  policy_->set_slots(n_slots);
}

double AdmissionPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return admitter_->is_worth(newcomer, victim) ? policy_->gain(newcomer, victim) : 0;
}

std::size_t AdmissionPolicy::rank(std::span<const ExpertIndex> candidates,
                                  std::span<ExpertIndex> victims_out) noexcept {
  std::size_t n = 0;
  {
    const CandidateMarks marks(marks_, candidates);
    n = guests_.append_marked(marks.flags(), victims_out, 0);
  }
  if (n == victims_out.size()) return n;
  known_.clear();
  for (const ExpertIndex expert : candidates) {
    if (!guests_.contains(expert)) known_.push_back(expert);
  }
  return n + policy_->rank(known_, victims_out.subspan(n));
}

}  // namespace moecached
