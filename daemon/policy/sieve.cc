#include "daemon/policy/sieve.h"

#include <algorithm>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> SievePolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<SievePolicy>(shape));
}

SievePolicy::SievePolicy(PolicyShape shape)
    : queue_(shape.n_experts), inserted_(shape.n_experts), mark_(shape.n_experts), marks_(shape.n_experts) {}

void SievePolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  now_ = std::max(now_, step);
  queue_.insert_from_back(expert, static_cast<RecencyList::Key>(step));
  inserted_[expert.value] = step;
  mark_[expert.value] = kNoMark;
}

void SievePolicy::on_access(ExpertIndex expert, Step step) noexcept {
  CHECK(queue_.contains(expert));
  now_ = std::max(now_, step);
  if (step != inserted_[expert.value]) mark_[expert.value] = step + 1;
}

void SievePolicy::on_miss(ExpertIndex, Step step) noexcept { now_ = std::max(now_, step); }

// The hand moves up to the expert, and takes the mark of those on its way: of all of them, when it had to
// come round because this one was marked.
void SievePolicy::on_remove(ExpertIndex expert) noexcept {
  CHECK(queue_.contains(expert));
  const auto pass = [this](ExpertIndex at) {
    if (mark_[at.value] != now_ + 1) mark_[at.value] = kNoMark;
  };
  ExpertIndex at = from_hand();
  if (mark_[expert.value] != kNoMark) {
    for (ExpertIndex each = queue_.first(); each != RecencyList::kEnd; each = queue_.next(each)) pass(each);
  } else {
    for (; at != expert; at = round(at)) pass(at);
  }
  hand_ = queue_.next(expert);
  queue_.erase(expert);
}

std::size_t SievePolicy::rank(std::span<const ExpertIndex> candidates,
                              std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  std::size_t n = 0;
  // Two rounds: those without a mark, then those that have lost it in the first.
  for (const bool is_marked : {false, true}) {
    ExpertIndex at = from_hand();
    for (std::uint32_t i = 0; i < queue_.size() && n < victims_out.size(); ++i, at = round(at)) {
      if (marks_[at.value] != 0 && (mark_[at.value] != kNoMark) == is_marked) victims_out[n++] = at;
    }
  }
  return n;
}

}  // namespace moecached
