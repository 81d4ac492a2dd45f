#include "daemon/policy/slru.h"

#include <algorithm>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {
namespace {

RecencyList::Key newest_end(Step step) { return static_cast<RecencyList::Key>(step); }

std::uint32_t protected_share(std::uint32_t n_slots, SlruOptions options) {
  const std::uint64_t rounded = (std::uint64_t{n_slots} * options.probation_percent + 50) / 100;
  return n_slots - std::max<std::uint32_t>(1, static_cast<std::uint32_t>(rounded));
}

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> SlruPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> percent =
      parsed->number("probation", {.low = 1, .high = 100}, SlruOptions{}.probation_percent);
  if (!percent) return percent.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(
      std::make_unique<SlruPolicy>(shape, SlruOptions{.probation_percent = *percent}));
}

SlruPolicy::SlruPolicy(PolicyShape shape, SlruOptions options)
    : options_(options),
      protected_slots_(protected_share(shape.n_slots, options)),
      probation_(shape.n_experts),
      protected_(shape.n_experts),
      last_step_(shape.n_experts),
      marks_(shape.n_experts) {}

// What is over a smaller share is demoted by the next use.
void SlruPolicy::set_slots(std::uint32_t n_slots) noexcept {
  protected_slots_ = protected_share(n_slots, options_);
}

void SlruPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  CHECK(!protected_.contains(expert));
  last_step_[expert.value] = step;
  probation_.insert_from_back(expert, newest_end(step));
}

void SlruPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  const bool was_protected = protected_.contains(expert);
  CHECK(was_protected || probation_.contains(expert));
  // Inserted or used in this step already: the same event. The list keys cannot tell, as a demotion renews
  // them.
  if (last_step_[expert.value] == step) return;
  last_step_[expert.value] = step;
  if (was_protected) {
    protected_.erase(expert);
  } else {
    probation_.erase(expert);
  }
  protected_.insert_from_back(expert, newest_end(step));
  while (protected_.size() > protected_slots_) {
    const ExpertIndex demoted = protected_.front();
    protected_.erase(demoted);
    probation_.insert_from_back(demoted, newest_end(step));
  }
}

void SlruPolicy::on_remove(ExpertIndex expert) noexcept {
  if (protected_.contains(expert)) {
    protected_.erase(expert);
  } else {
    probation_.erase(expert);
  }
}

std::size_t SlruPolicy::rank(std::span<const ExpertIndex> candidates,
                             std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  const std::size_t n_victims = probation_.append_marked(marks.flags(), victims_out, 0);
  return protected_.append_marked(marks.flags(), victims_out, n_victims);
}

}  // namespace moecached
