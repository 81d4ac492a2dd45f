#include "daemon/residency/slot_trader.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "daemon/residency/brain.h"

namespace moecached {
namespace {

constexpr double kStepsMin = 16;      // before that the pools are not even full
constexpr double kRepaySteps = 1000;  // in which the two loads of a trade must be saved
constexpr std::uint32_t kWidestSteps = 4096;
constexpr std::size_t kCurveWidthMax = 64;  // of several lanes' tokens that come as one batch, more is rare
// Standard deviations. The best of fifty equal layers is 2.3 of them above the average by chance alone.
constexpr double kDeviations = 2.5;
// A slope is taken over so many places: single ones are noisy, and of many experts each is like the next.
std::uint32_t span_of(const HitCurve& curve) { return std::max(1u, curve.n_experts() / 32); }

}  // namespace

SlotTrader::SlotTrader(const ModelShape& shape) {
  std::map<std::uint32_t, std::uint32_t> classes;
  layers_.reserve(shape.layers.size());
  for (const LayerShape& layer : shape.layers) {
    const auto next = static_cast<std::uint32_t>(classes.size());
    layers_.push_back({.curve = HitCurve(layer.n_experts),
                       .class_index = classes.try_emplace(layer.slot_class, next).first->second,
                       .n_slots = layer.n_slots});
  }
  best_.resize(classes.size());
}

void SlotTrader::use(LayerIndex index, std::span<const ExpertIndex> experts) noexcept {
  Layer& layer = layers_[index.value];
  ++n_events_;
  // What a curve costs grows with the square of it, and a client says how wide a step is.
  if (experts.size() <= kCurveWidthMax) layer.curve.use(experts);
  layer.widest = std::max(layer.widest, static_cast<std::uint32_t>(experts.size()));
  if (++layer.n_steps < kWidestSteps) return;
  layer.n_steps = 0;
  layer.widest_before = layer.widest;
  layer.widest = 0;
}

void SlotTrader::look_at(std::uint32_t index, const Side& side) noexcept {
  const Layer& layer = layers_[index];
  if (layer.curve.steps() < kStepsMin) return;
  Best& best = best_[layer.class_index];
  const std::uint32_t n_wanted = std::min(layer.n_slots, std::max(layer.widest, layer.widest_before));
  const std::uint32_t n = side.n_slots, span = span_of(layer.curve);
  if (side.can_give && n > n_wanted) {
    const std::uint32_t first = n - std::min(n, span);
    const double loss = layer.curve.uses(first, n) / (n - first);
    if (best.from == UINT32_MAX || loss < best.loss) {
      best.from = index;
      best.loss = loss;
    }
  }
  if (side.can_take) {
    const double gain =
        n < n_wanted ? std::numeric_limits<double>::infinity() : layer.curve.uses(n, n + span) / span;
    if (best.to == UINT32_MAX || gain > best.gain) {
      best.to = index;
      best.gain = gain;
    }
  }
}

// In uses per step, beyond chance and cost.
double SlotTrader::worth(const Best& best) const noexcept {
  if (best.from == UINT32_MAX || best.to == UINT32_MAX || best.from == best.to) return 0;
  const HitCurve& curve = layers_[best.to].curve;
  // Uses are counts: their variance is their number.
  const double n_steps = std::min(curve.steps(), layers_[best.from].curve.steps()) * span_of(curve);
  const double chance =
      std::isinf(best.gain) ? 0 : kDeviations * std::sqrt((best.gain + best.loss) / n_steps);
  return best.gain - best.loss - chance - 2 / kRepaySteps;
}

std::optional<SlotTrader::Trade> SlotTrader::choose(std::span<const Side> sides) noexcept {
  next_ = n_events_ + layers_.size();
  std::ranges::fill(best_, Best{});
  for (std::uint32_t i = 0; i < layers_.size(); ++i) look_at(i, sides[i]);
  const auto most = std::ranges::max_element(best_, {}, [this](const Best& best) { return worth(best); });
  if (!(worth(*most) > 0)) return std::nullopt;
  return Trade{LayerIndex(most->from), LayerIndex(most->to)};
}

std::vector<std::uint32_t> SlotTrader::share_out(std::span<const std::uint32_t> have,
                                                 std::span<const std::uint32_t> even,
                                                 std::span<const std::uint32_t> room) const {
  std::vector<std::uint32_t> out(even.begin(), even.end());
  std::vector<std::uint64_t> left(best_.size(), 0);  // by class
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].curve.steps() < kStepsMin) continue;
    left[layers_[i].class_index] += even[i] - have[i];
    out[i] = have[i];
  }
  for (std::size_t c = 0; c < left.size(); ++c) {
    for (; left[c] > 0; --left[c]) {
      std::size_t most = layers_.size();
      double most_gain = -std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < layers_.size(); ++i) {
        const Layer& layer = layers_[i];
        if (layer.class_index != c || layer.curve.steps() < kStepsMin || even[i] == 0 || out[i] >= room[i])
          continue;
        const std::uint32_t span = span_of(layer.curve);
        double gain = layer.curve.uses(out[i], out[i] + span) / span;
        // More than an even share goes only where need is more than chance.
        if (out[i] >= even[i]) gain -= kDeviations * std::sqrt(gain / (layer.curve.steps() * span));
        if (gain > most_gain) {
          most_gain = gain;
          most = i;
        }
      }
      if (most == layers_.size()) break;  // no room anywhere
      ++out[most];
    }
  }
  return out;
}

}  // namespace moecached
