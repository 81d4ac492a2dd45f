#include "daemon/policy/fifo.h"

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> FifoPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<FifoPolicy>(shape));
}

FifoPolicy::FifoPolicy(PolicyShape shape) : residents_(shape.n_experts), marks_(shape.n_experts) {}

void FifoPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  residents_.insert_from_back(expert, static_cast<RecencyList::Key>(step));
}

void FifoPolicy::on_access(ExpertIndex expert, Step) noexcept { CHECK(residents_.contains(expert)); }

void FifoPolicy::on_remove(ExpertIndex expert) noexcept { residents_.erase(expert); }

std::size_t FifoPolicy::rank(std::span<const ExpertIndex> candidates,
                             std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  return residents_.append_marked(marks.flags(), victims_out, 0);
}

}  // namespace moecached
