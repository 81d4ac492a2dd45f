#include "daemon/policy/next_layer.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moecached {
namespace {

constexpr float kWeightRate = 0.05F;  // of descent, for weights_
constexpr float kPairRate = 0.08F;    // for pairs_: a pair is met rarely, so each time counts
constexpr float kRateFloor = 0.002F;  // added to a rate, so that its logarithm is bounded
constexpr float kLogitMax = 20;

// To within 0.09, piecewise linear, as a float holds it; the weights are learnt over it.
float rough_log2(float value) {
  return static_cast<float>(std::bit_cast<std::int32_t>(value)) * 0x1p-23F - 127.0F;
}

// exp to within 0.3 %, without a call, so that a whole layer is one loop. REQUIRES: |x| <= kLogitMax.
float rough_exp(float x) {
  const float scaled = x * 1.44269504F + 64;  // positive: truncation rounds down
  const auto whole = static_cast<std::int32_t>(scaled);
  const float part = scaled - static_cast<float>(whole);
  const float mantissa = 1 + part * (0.6565F + part * 0.3435F);
  return mantissa * std::bit_cast<float>((whole - 64 + 127) << 23);
}

}  // namespace

NextLayerPredictor::NextLayerPredictor(std::uint32_t n_source_experts, std::uint32_t n_experts)
    : n_experts_(n_experts), likelihood_(n_experts) {
  for (std::size_t d = 0; d < kRates; ++d) {
    rates_[d].resize(n_experts);
    features_[d].resize(n_experts, rough_log2(kRateFloor));
  }
  const std::size_t n_pairs = std::size_t{n_source_experts} * n_experts;
  if (n_pairs <= kPairsMax) pairs_.resize(n_pairs);
  // As if a rate were the probability: what the averages alone would say.
  weights_ = {0.3F, 0.7F, 1};
  squares_.fill(1e-4F);
}

std::span<const float> NextLayerPredictor::predict(std::span<const ExpertIndex> source) noexcept {
  static_assert(kRates == 2);
  for (std::uint32_t e = 0; e < n_experts_; ++e)
    likelihood_[e] = weights_[kRates] + weights_[0] * features_[0][e] + weights_[1] * features_[1][e];
  if (!pairs_.empty()) {
    for (const ExpertIndex each : source) {
      const float* pairs = &pairs_[std::size_t{each.value} * n_experts_];
      for (std::uint32_t e = 0; e < n_experts_; ++e) likelihood_[e] += pairs[e];
    }
  }
  for (float& each : likelihood_) each = 1 / (1 + rough_exp(-std::clamp(each, -kLogitMax, kLogitMax)));
  return likelihood_;
}

void NextLayerPredictor::teach(std::span<const ExpertIndex> source,
                               std::span<const ExpertIndex> used) noexcept {
  (void)predict(source);
  std::vector<float>& error = likelihood_;
  for (const ExpertIndex each : used) error[each.value] -= 1;
  if (!pairs_.empty()) {
    for (const ExpertIndex each : source) {
      float* pairs = &pairs_[std::size_t{each.value} * n_experts_];
      for (std::uint32_t e = 0; e < n_experts_; ++e) pairs[e] -= kPairRate * error[e];
    }
  }
  std::array<float, kRates + 1> gradient{};
  for (std::uint32_t e = 0; e < n_experts_; ++e) {
    gradient[0] += error[e] * features_[0][e];
    gradient[1] += error[e] * features_[1][e];
    gradient[kRates] += error[e];
  }
  for (std::size_t i = 0; i <= kRates; ++i) {
    const float mean = gradient[i] / static_cast<float>(n_experts_);
    squares_[i] += mean * mean;
    weights_[i] -= kWeightRate * mean / std::sqrt(squares_[i]);
  }
  for (std::size_t d = 0; d < kRates; ++d) {
    std::vector<float>& rates = rates_[d];
    for (float& rate : rates) rate *= kDecays[d];
    for (const ExpertIndex each : used) rates[each.value] += 1 - kDecays[d];
    for (std::uint32_t e = 0; e < n_experts_; ++e) features_[d][e] = rough_log2(rates[e] + kRateFloor);
  }
}

}  // namespace moecached
