#include "daemon/policy/learned.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "daemon/policy/policy_options.h"

namespace moecached {
namespace {

constexpr float kWeightRate = 0.05F;  // of descent, for weights_
constexpr float kPairRate = 0.01F;    // for pairs_
constexpr float kPairFade = 1e-5F;    // towards 0, each time
constexpr float kRateFloor = 0.002F;  // added to a rate, so that its logarithm is bounded

// log2 to within 0.09, piecewise linear: the exponent and the mantissa as they lie in a float. The weights
// are learnt over it, so exactness buys nothing.
float rough_log2(float value) {
  return static_cast<float>(std::bit_cast<std::int32_t>(value)) * 0x1p-23F - 127.0F;
}

float sigmoid(float logit) { return 1 / (1 + std::exp(-logit)); }

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> LearnedPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<LearnedPolicy>(shape));
}

LearnedPolicy::LearnedPolicy(PolicyShape shape)
    : n_experts_(shape.n_experts),
      has_pairs_(shape.n_experts <= kPairExpertsMax),
      rates_(std::size_t{shape.n_experts} * kRates),
      last_step_(shape.n_experts),
      pairs_(has_pairs_ ? std::size_t{shape.n_experts} * shape.n_experts : 0),
      past_features_(std::size_t{shape.n_experts} * kRates * (kHorizon + 1)),
      ranking_(shape.n_experts) {
  weights_.fill(1.0F / kRates);
  weights_[kRates] = 1;
  squares_.fill(1e-4F);
}

void LearnedPolicy::Used::add(std::uint32_t expert) noexcept {
  if (n++ >= kStepExpertsMax) return;
  std::uint32_t at = n - 1;
  for (; at > 0 && experts[at - 1] > expert; --at) experts[at] = experts[at - 1];
  experts[at] = expert;
}

std::span<float> LearnedPolicy::features_of(Step step) noexcept {
  const std::size_t size = std::size_t{n_experts_} * kRates;
  return std::span(past_features_).subspan(step % (kHorizon + 1) * size, size);
}

float LearnedPolicy::logit(std::span<const float, kRates> features, std::uint32_t expert,
                           const Used& used) const noexcept {
  float sum = weights_[kRates];
  for (std::uint32_t d = 0; d < kRates; ++d) sum += weights_[d] * features[d];
  if (has_pairs_) {
    for (const std::uint32_t each : used.listed()) sum += pairs_[std::size_t{each} * n_experts_ + expert];
  }
  return sum;
}

void LearnedPolicy::use(ExpertIndex expert, Step step) noexcept {
  if (step > now_.step) {
    end_step();
    // Steps without a use: everything fades.
    for (Step missed = std::min<Step>(step - now_.step - 1, 1000); missed > 0; --missed) {
      for (std::size_t i = 0; i < rates_.size(); ++i) rates_[i] *= kDecays[i % kRates];
    }
    now_ = {.step = step};
  }
  Step& last = last_step_[expert.value];
  // What is older than now is known, or too late to be learnt from.
  if (step < now_.step || (last == step && step != 0)) return;
  last = step;
  now_.add(expert.value);
}

void LearnedPolicy::end_step() noexcept {
  const std::span<float> features = features_of(now_.step);
  for (std::uint32_t e = 0; e < n_experts_; ++e) {
    const bool is_used = last_step_[e] == now_.step && now_.step != 0;
    for (std::uint32_t d = 0; d < kRates; ++d) {
      float& rate = rates_[e * kRates + d];
      rate = rate * kDecays[d] + (is_used ? 1 - kDecays[d] : 0);
      features[e * kRates + d] = rough_log2(rate + kRateFloor);
    }
  }
  past_used_[now_.step % (kHorizon + 1)] = now_;
  if (now_.step <= kHorizon) return;
  const Used& then = past_used_[(now_.step - kHorizon) % (kHorizon + 1)];
  // Not if that step was skipped.
  if (then.step == now_.step - kHorizon && then.n > 0) learn(then, features_of(then.step));
}

void LearnedPolicy::learn(const Used& used, std::span<const float> features) noexcept {
  std::array<float, kRates + 1> gradient{};
  for (std::uint32_t e = 0; e < n_experts_; ++e) {
    const auto own = features.subspan(e * kRates).first<kRates>();
    const float error = sigmoid(logit(own, e, used)) - (last_step_[e] > used.step ? 1.0F : 0.0F);
    for (std::uint32_t d = 0; d < kRates; ++d) gradient[d] += error * own[d];
    gradient[kRates] += error;
    if (!has_pairs_) continue;
    for (const std::uint32_t each : used.listed()) {
      float& pair = pairs_[std::size_t{each} * n_experts_ + e];
      pair -= kPairRate * error + kPairFade * pair;
    }
  }
  for (std::uint32_t d = 0; d <= kRates; ++d) {
    const float mean = gradient[d] / static_cast<float>(n_experts_);
    squares_[d] += mean * mean;
    weights_[d] -= kWeightRate * mean / std::sqrt(squares_[d]);
  }
}

double LearnedPolicy::likelihood(ExpertIndex expert) const noexcept {
  const bool is_used = last_step_[expert.value] == now_.step && now_.step != 0;
  std::array<float, kRates> features{};
  for (std::uint32_t d = 0; d < kRates; ++d) {
    const float rate = rates_[expert.value * kRates + d];
    features[d] = rough_log2(rate * kDecays[d] + (is_used ? 1 - kDecays[d] : 0) + kRateFloor);
  }
  return sigmoid(logit(features, expert.value, now_));
}

// The miss that led to it has been counted, unless this policy has only just taken over.
void LearnedPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  if (last_step_[expert.value] == 0) use(expert, step);
}
void LearnedPolicy::on_access(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void LearnedPolicy::on_miss(ExpertIndex expert, Step step) noexcept { use(expert, step); }
void LearnedPolicy::on_remove(ExpertIndex) noexcept {}  // what was learnt about it stays

void LearnedPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  now_ = {.step = now};
  const std::size_t n = std::min<std::size_t>(past.size(), n_experts_);
  for (std::size_t e = 0; e < n; ++e) {
    for (std::uint32_t d = 0; d < kRates; ++d)
      rates_[e * kRates + d] = static_cast<float>(past[e].uses_per_step);
    last_step_[e] = past[e].last_step;
  }
}

double LearnedPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return (likelihood(newcomer) - likelihood(victim)) / kHorizon;
}

std::size_t LearnedPolicy::rank(std::span<const ExpertIndex> candidates,
                                std::span<ExpertIndex> victims_out) noexcept {
  ranking_.clear();
  for (const ExpertIndex expert : candidates)
    ranking_.add(likelihood(expert), last_step_[expert.value], expert);
  return ranking_.write_lowest(victims_out);
}

}  // namespace moecached
