#include "daemon/policy/arc.h"

#include <algorithm>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {
namespace {

RecencyList::Key key_of(Step step) { return static_cast<RecencyList::Key>(step); }

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> ArcPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<ArcPolicy>(shape));
}

ArcPolicy::ArcPolicy(PolicyShape shape)
    : n_slots_(shape.n_slots),
      recent_(shape.n_experts),
      frequent_(shape.n_experts),
      recent_lost_(shape.n_experts),
      frequent_lost_(shape.n_experts),
      last_step_(shape.n_experts),
      learnt_(shape.n_experts),
      marks_(shape.n_experts) {}

double ArcPolicy::target() const noexcept { return std::clamp<double>(target_ + shift_, 0, n_slots_); }

// `recent` and its lost names are at most n_slots together, and all four lists twice that.
void ArcPolicy::begin(Step step) noexcept {
  if (step <= now_) return;
  now_ = step;
  target_ = target();
  shift_ = 0;
  has_frequent_miss_ = false;
  while (recent_lost_.size() > 0 && recent_.size() + recent_lost_.size() > n_slots_)
    recent_lost_.erase(recent_lost_.front());
  while (frequent_lost_.size() > 0 &&
         recent_.size() + recent_lost_.size() + frequent_.size() + frequent_lost_.size() > 2 * n_slots_)
    frequent_lost_.erase(frequent_lost_.front());
  n_recent_lost_ = recent_lost_.size();
  n_frequent_lost_ = frequent_lost_.size();
}

void ArcPolicy::learn(ExpertIndex expert, Step step) noexcept {
  begin(step);
  if (learnt_[expert.value] >= step + 1) return;
  learnt_[expert.value] = step + 1;
  if (recent_lost_.contains(expert)) {
    shift_ += std::max(1.0, n_frequent_lost_ / std::max(1.0, n_recent_lost_));
  } else if (frequent_lost_.contains(expert)) {
    has_frequent_miss_ = true;
    shift_ -= std::max(1.0, n_recent_lost_ / std::max(1.0, n_frequent_lost_));
  }
}

void ArcPolicy::on_miss(ExpertIndex expert, Step step) noexcept { learn(expert, step); }

void ArcPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  CHECK(!recent_.contains(expert) && !frequent_.contains(expert));
  learn(expert, step);
  last_step_[expert.value] = step;
  if (recent_lost_.contains(expert)) {
    recent_lost_.erase(expert);
    frequent_.insert_from_back(expert, key_of(step));
  } else if (frequent_lost_.contains(expert)) {
    frequent_lost_.erase(expert);
    frequent_.insert_from_back(expert, key_of(step));
  } else {
    recent_.insert_from_back(expert, key_of(step));
  }
}

void ArcPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  const bool is_recent = recent_.contains(expert);
  CHECK(is_recent || frequent_.contains(expert));
  begin(step);
  if (last_step_[expert.value] == step) return;
  last_step_[expert.value] = step;
  (is_recent ? recent_ : frequent_).erase(expert);
  frequent_.insert_from_back(expert, key_of(step));
}

void ArcPolicy::on_remove(ExpertIndex expert) noexcept {
  if (recent_.contains(expert)) {
    recent_.erase(expert);
    recent_lost_.insert_from_back(expert, key_of(now_));
  } else {
    frequent_.erase(expert);
    frequent_lost_.insert_from_back(expert, key_of(now_));
  }
}

std::size_t ArcPolicy::rank(std::span<const ExpertIndex> candidates,
                            std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  const auto skip = [this](const RecencyList& list, ExpertIndex at) {
    while (at != RecencyList::kEnd && marks_[at.value] == 0) at = list.next(at);
    return at;
  };
  ExpertIndex recent = skip(recent_, recent_.first());
  ExpertIndex frequent = skip(frequent_, frequent_.first());
  const std::size_t n_wanted = std::min(candidates.size(), victims_out.size());
  double n_recent = recent_.size();
  for (std::size_t n = 0; n < n_wanted; ++n) {
    const bool is_over = n_recent > target() || (has_frequent_miss_ && n_recent == target());
    const bool takes_recent = frequent == RecencyList::kEnd || (recent != RecencyList::kEnd && is_over);
    CHECK(takes_recent ? recent != RecencyList::kEnd : frequent != RecencyList::kEnd);
    if (takes_recent) {
      victims_out[n] = recent;
      recent = skip(recent_, recent_.next(recent));
      --n_recent;
    } else {
      victims_out[n] = frequent;
      frequent = skip(frequent_, frequent_.next(frequent));
    }
  }
  return n_wanted;
}

}  // namespace moecached
