#include "daemon/policy/ewma.h"

#include "daemon/policy/policy_options.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> EwmaPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> decay = parsed->number("decay", {.low = 500, .high = 999}, 970);
  if (!decay) return decay.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<EwmaPolicy>(shape, *decay / 1000.0));
}

EwmaPolicy::EwmaPolicy(PolicyShape shape, double decay)
    : rates_(shape.n_experts, decay), ranking_(shape.n_experts) {}

double EwmaPolicy::score(ExpertIndex expert) const noexcept { return rates_.rate(expert); }

// The miss that led to it has been counted, unless this policy has only just taken over.
void EwmaPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  if (rates_.last_step(expert) == 0) rates_.use(expert, step);
}
void EwmaPolicy::on_access(ExpertIndex expert, Step step) noexcept { rates_.use(expert, step); }
void EwmaPolicy::on_miss(ExpertIndex expert, Step step) noexcept { rates_.use(expert, step); }
void EwmaPolicy::on_remove(ExpertIndex) noexcept {}  // what was learnt about it stays
void EwmaPolicy::seed(std::span<const PastUse> past, Step now) noexcept { rates_.seed(past, now); }

double EwmaPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return score(newcomer) - score(victim);
}

std::size_t EwmaPolicy::rank(std::span<const ExpertIndex> candidates,
                             std::span<ExpertIndex> victims_out) noexcept {
  ranking_.clear();
  for (const ExpertIndex expert : candidates) ranking_.add(score(expert), rates_.last_step(expert), expert);
  return ranking_.write_lowest(victims_out);
}

}  // namespace moecached
