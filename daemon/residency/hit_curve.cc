#include "daemon/residency/hit_curve.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace moecached {
namespace {

constexpr double kWeightMax = 1e100;

}  // namespace

HitCurve::HitCurve(std::uint32_t n_experts)
    : scores_(n_experts), uses_(n_experts), stack_(n_experts), places_(n_experts) {
  for (std::uint32_t i = 0; i < n_experts; ++i) {
    stack_[i] = {.score = 0, .expert = i};
    places_[i] = i;
  }
}

void HitCurve::use(std::span<const ExpertIndex> experts) noexcept {
  use_weight_ /= kUseDecay;
  step_weight_ /= 1 - 1 / kMemory;
  if (use_weight_ > kWeightMax || step_weight_ > kWeightMax) rescale();
  weight_ += step_weight_;
  for (const ExpertIndex expert : experts) {
    const std::uint32_t place = places_[expert.value];
    uses_[place] += step_weight_;
    scores_[expert.value] += use_weight_;
    stack_[place].score = std::numeric_limits<double>::infinity();
  }
  for (const ExpertIndex expert : experts) raise(expert.value);
  // They have the first places now.
  for (std::size_t place = 0; place < experts.size(); ++place)
    stack_[place].score = scores_[stack_[place].expert];
}

// To the first place. At each place that it passes the lower score of two falls on: the one that a pool of
// that size would evict. Without a branch, as which of the two it is cannot be predicted.
void HitCurve::raise(std::uint32_t expert) noexcept {
  const std::uint32_t end = places_[expert];
  if (end == 0) return;
  Entry falling = stack_[0];
  stack_[0] = stack_[end];
  places_[expert] = 0;
  for (std::uint32_t place = 1; place < end; ++place) {
    const Entry here = stack_[place];
    const bool stays = here.score >= falling.score;
    const Entry kept{stays ? here.score : falling.score, stays ? here.expert : falling.expert};
    falling = {stays ? falling.score : here.score, stays ? falling.expert : here.expert};
    stack_[place] = kept;
    places_[kept.expert] = place;
  }
  stack_[end] = falling;
  places_[falling.expert] = end;
}

double HitCurve::uses(std::uint32_t first, std::uint32_t last) const noexcept {
  if (weight_ == 0) return 0;
  last = std::min(last, n_experts());
  double sum = 0;
  for (std::uint32_t place = first; place < last; ++place) sum += uses_[place];
  return sum / weight_;
}

void HitCurve::rescale() noexcept {
  for (double& score : scores_) score /= use_weight_;
  for (Entry& entry : stack_) entry.score /= use_weight_;
  for (double& use : uses_) use /= step_weight_;
  weight_ /= step_weight_;
  use_weight_ = step_weight_ = 1;
}

}  // namespace moecached
