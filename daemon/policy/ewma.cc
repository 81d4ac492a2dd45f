#include "daemon/policy/ewma.h"

#include <algorithm>
#include <cmath>
#include <tuple>

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

EwmaPolicy::EwmaPolicy(PolicyShape shape, double decay) : decay_(decay), averages_(shape.n_experts) {
  for (std::size_t i = 0; i < powers_.size(); ++i) powers_[i] = std::pow(decay, static_cast<double>(i));
  ranked_.reserve(shape.n_experts);
}

double EwmaPolicy::faded(const Average& average, Step now) const noexcept {
  const Step steps = now - average.step;
  return average.value *
         (steps < powers_.size() ? powers_[steps] : std::pow(decay_, static_cast<double>(steps)));
}

double EwmaPolicy::score(ExpertIndex expert) const noexcept { return faded(averages_[expert.value], now_); }

void EwmaPolicy::use(ExpertIndex expert, Step step) noexcept {
  now_ = std::max(now_, step);
  Average& average = averages_[expert.value];
  // A miss and the insertion that it leads to are one use; so is anything older than what is known.
  if (average.step >= step && average.step != 0) return;
  average.value = faded(average, step) + (1 - decay_);
  average.step = step;
}

// The miss that led to it has been counted, unless this policy has only just taken over.
void EwmaPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  if (averages_[expert.value].step == 0) use(expert, step);
}
void EwmaPolicy::on_access(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void EwmaPolicy::on_miss(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void EwmaPolicy::on_remove(ExpertIndex) noexcept {}  // what was learnt about it stays

double EwmaPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return score(newcomer) - score(victim);
}

std::size_t EwmaPolicy::rank(std::span<const ExpertIndex> candidates,
                             std::span<ExpertIndex> victims_out) noexcept {
  ranked_.clear();
  for (const ExpertIndex expert : candidates)
    ranked_.push_back({score(expert), averages_[expert.value].step, expert});
  const std::size_t n = std::min(candidates.size(), victims_out.size());
  std::partial_sort(ranked_.begin(), ranked_.begin() + static_cast<std::ptrdiff_t>(n), ranked_.end(),
                    [](const Ranked& a, const Ranked& b) {
                      return std::tie(a.score, a.step, a.expert) < std::tie(b.score, b.step, b.expert);
                    });
  for (std::size_t i = 0; i < n; ++i) victims_out[i] = ranked_[i].expert;
  return n;
}

}  // namespace moecached
