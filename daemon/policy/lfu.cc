#include "daemon/policy/lfu.h"

#include <algorithm>
#include <cmath>

#include "daemon/policy/policy_options.h"

namespace moecached {
namespace {

// A rate that was handed over weighs like this many steps, where nothing fades.
constexpr double kSeedSteps = 256;

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> LfuPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> halve = parsed->number("halve", {.low = 1, .high = 1'000'000}, 0);
  if (!halve) return halve.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<LfuPolicy>(shape, *halve));
}

LfuPolicy::LfuPolicy(PolicyShape shape, std::uint32_t halve_every)
    : halve_every_(halve_every), uses_(shape.n_experts), ranking_(shape.n_experts) {}

void LfuPolicy::advance(Step step) noexcept {
  if (step <= now_) return;
  if (halve_every_ != 0) {
    if (const Step n = step / halve_every_ - now_ / halve_every_; n != 0) {
      const double factor = std::ldexp(1.0, -static_cast<int>(std::min<Step>(n, 1000)));
      for (Use& each : uses_) each.count *= factor;
      weight_ *= factor;
    }
  }
  weight_ += static_cast<double>(step - now_);
  now_ = step;
}

void LfuPolicy::use(ExpertIndex expert, Step step) noexcept {
  advance(step);
  Use& each = uses_[expert.value];
  if (each.counted >= step && each.counted != 0) return;
  each.count += 1;
  each.counted = step;
  each.last_step = step;
}

// The miss that led to it has been counted, unless this policy has only just taken over.
void LfuPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  if (uses_[expert.value].last_step == 0) use(expert, step);
}
void LfuPolicy::on_access(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void LfuPolicy::on_miss(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void LfuPolicy::on_remove(ExpertIndex) noexcept {}  // its count stays

void LfuPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  now_ = std::max(now_, now);
  weight_ = halve_every_ == 0 ? kSeedSteps : halve_every_;
  const std::size_t n = std::min(past.size(), uses_.size());
  for (std::size_t i = 0; i < n; ++i) {
    uses_[i] = {.count = past[i].uses_per_step * weight_, .counted = now, .last_step = past[i].last_step};
  }
}

double LfuPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return (count(newcomer) - count(victim)) / std::max(1.0, weight_);
}

std::size_t LfuPolicy::rank(std::span<const ExpertIndex> candidates,
                            std::span<ExpertIndex> victims_out) noexcept {
  ranking_.clear();
  for (const ExpertIndex expert : candidates)
    ranking_.add(count(expert), uses_[expert.value].last_step, expert);
  return ranking_.write_lowest(victims_out);
}

}  // namespace moecached
