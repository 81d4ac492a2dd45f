#include "daemon/policy/static.h"

#include <algorithm>

#include "daemon/policy/policy_options.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> StaticPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> learn = parsed->number("learn", {.low = 1, .high = 1'000'000}, 256);
  if (!learn) return learn.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<StaticPolicy>(shape, *learn));
}

StaticPolicy::StaticPolicy(PolicyShape shape, std::uint32_t learn_steps)
    : learn_steps_(learn_steps), scores_(shape.n_experts), ranking_(shape.n_experts) {}

void StaticPolicy::use(ExpertIndex expert, Step step) noexcept {
  if (step > now_) {
    now_ = step;
    n_learnt_ = std::min(n_learnt_ + 1, learn_steps_ + 1);
  }
  Score& score = scores_[expert.value];
  // The step that ends the lesson is counted whole, whichever of its experts is reported first.
  if (n_learnt_ > learn_steps_ || (score.counted >= step && score.counted != 0)) return;
  score.value += 1;
  score.counted = step;
}

// The miss that led to it has been counted, unless this policy has only just taken over.
void StaticPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  if (scores_[expert.value].counted == 0) use(expert, step);
}
void StaticPolicy::on_access(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void StaticPolicy::on_miss(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void StaticPolicy::on_remove(ExpertIndex) noexcept {}  // its score stays

void StaticPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  // A list without a single use is none: then it learns as if it had not been told.
  if (std::ranges::none_of(past, [](const PastUse& each) { return each.uses_per_step > 0; })) return;
  now_ = std::max(now_, now);
  n_learnt_ = learn_steps_ + 1;
  const std::size_t n = std::min(past.size(), scores_.size());
  for (std::size_t i = 0; i < n; ++i)
    scores_[i] = {.value = past[i].uses_per_step * learn_steps_, .counted = now};
}

double StaticPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  const double steps = std::clamp(n_learnt_, 1u, learn_steps_);
  return (scores_[newcomer.value].value - scores_[victim.value].value) / steps;
}

std::size_t StaticPolicy::rank(std::span<const ExpertIndex> candidates,
                               std::span<ExpertIndex> victims_out) noexcept {
  ranking_.clear();
  for (const ExpertIndex expert : candidates) ranking_.add(scores_[expert.value].value, 0, expert);
  return ranking_.write_lowest(victims_out);
}

}  // namespace moecached
