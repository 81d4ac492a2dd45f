#include "daemon/ipc/route_ids.h"

#include <algorithm>
#include <string>

namespace moecached {
namespace {

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

}  // namespace

RouteIds::RouteIds(std::span<const LayerLimits> limits) : limits_(limits) {
  std::uint32_t n_experts = 0;
  for (const LayerLimits& layer : limits) n_experts = std::max(n_experts, layer.n_experts);
  seen_.assign(n_experts, 0);
  distinct_.reserve(n_experts);
}

Status RouteIds::take(const RouteDecision& decision) {
  distinct_.clear();
  if (decision.layer >= limits_.size()) {
    return invalid("layer " + std::to_string(decision.layer) + ": the model has " +
                   std::to_string(limits_.size()) + " MoE layers, counted from 0");
  }
  const std::size_t n_ids = decision.experts.size();
  if (n_ids == 0 || n_ids > kRouteIdsMax) {
    return invalid("a decision of " + std::to_string(n_ids) + " experts: it must name 1 to " +
                   std::to_string(kRouteIdsMax) + ", send the tokens in several");
  }
  const std::uint32_t n_tokens = std::max(decision.n_tokens, 1u);
  if (n_ids % n_tokens != 0) {
    return invalid(std::to_string(n_ids) + " experts for " + std::to_string(n_tokens) +
                   " tokens: each token has as many as the others");
  }
  const std::uint32_t n_experts = limits_[decision.layer].n_experts;
  if (++stamp_ == 0) {
    std::fill(seen_.begin(), seen_.end(), 0);
    stamp_ = 1;
  }
  for (const std::uint32_t id : decision.experts) {
    if (id >= n_experts) {
      distinct_.clear();
      return invalid("expert " + std::to_string(id) + ": layer " + std::to_string(decision.layer) + " has " +
                     std::to_string(n_experts) + ", counted from 0");
    }
    if (seen_[id] == stamp_) continue;
    seen_[id] = stamp_;
    distinct_.push_back(static_cast<std::uint16_t>(id));
  }
  return ok();
}

}  // namespace moecached
