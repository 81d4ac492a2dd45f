#include "daemon/ipc/shadows.h"

#include <algorithm>

namespace moecached {
namespace {

// Some seconds of a fast decode; the reader looks several times a second.
constexpr std::size_t kTapBytes = 4u << 20;
constexpr std::uint64_t kHitsMax = 0xffff;

}  // namespace

Result<std::unique_ptr<ShadowSet>> ShadowSet::make(ModelId model, ModelShape shape, MissMode mode,
                                                   std::vector<std::string> specs) {
  if (specs.empty() || specs.size() > kChallengersMax) {
    return Fault{FaultCode::kInvalid, std::to_string(specs.size()) +
                                          " challengers were given; a model has 1 to " +
                                          std::to_string(kChallengersMax)};
  }
  auto set = std::make_unique<ShadowSet>();
  for (const std::string& spec : specs) {
    ModelShape own = shape;
    own.policy = spec;
    auto pool = InstantPool::create(own, mode);
    if (!pool) return std::move(pool).error().with_context("challenger " + spec);
    set->pools.push_back(*std::move(pool));
  }
  set->model = model;
  set->shape = std::move(shape);
  set->mode = mode;
  set->specs = std::move(specs);
  set->tap = std::make_shared<RoutingTap>(model, kTapBytes);
  return set;
}

Status Shadows::start(std::unique_ptr<ShadowSet> set, Brain& live) {
  const ModelId model = set->model;
  const std::span<const LayerCounters> counters = live.counters(model);
  if (counters.size() != set->shape.layers.size())
    return Fault{FaultCode::kNotFound, "model " + std::to_string(model.value) + " was dropped meanwhile"};
  const std::vector<std::vector<double>> rates = live.use_rates(model);
  set->live_before.assign(counters.begin(), counters.end());
  for (const auto& pool : set->pools) {
    for (std::uint32_t l = 0; l < counters.size(); ++l) {
      for (std::uint32_t e = 0; e < set->shape.layers[l].n_experts; ++e) {
        if (live.is_resident(model, LayerIndex(l), ExpertIndex(e)))
          (void)pool->preload(LayerIndex(l), ExpertIndex(e));
      }
    }
    if (Status seeded = pool->seed(rates); !seeded) return seeded;
    set->before.emplace_back(pool->counters().begin(), pool->counters().end());
  }
  sets_[model.value] = std::move(set);
  return ok();
}

const ShadowSet* Shadows::find(ModelId model) const {
  const auto found = sets_.find(model.value);
  return found == sets_.end() ? nullptr : found->second.get();
}

void Shadows::event(ModelId model, LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase,
                    std::uint64_t live_hits) noexcept {
  if (sets_.empty()) return;
  const auto found = sets_.find(model.value);
  if (found == sets_.end()) return;
  ShadowSet& set = *found->second;
  std::uint64_t hits = std::min(live_hits, kHitsMax);
  for (std::size_t i = 0; i < set.pools.size(); ++i) {
    const InstantPool::Outcome outcome = set.pools[i]->event(LaneId(0), layer, experts, phase);
    hits |= std::min<std::uint64_t>(outcome.hits, kHitsMax) << (16 * (i + 1));
  }
  set.tap->put({.lane = hits, .graph = 0, .layer = layer, .prefill = phase == Phase::kPrompt}, experts);
}

}  // namespace moecached
