#include "daemon/residency/prefetch.h"

#include <algorithm>

#include "daemon/residency/brain_state.h"

namespace moecached {
namespace {

// The prefetch counters alone.
LayerCounters prefetches_of(std::span<const LayerCounters> layers) {
  LayerCounters sum;
  for (const LayerCounters& layer : layers) {
    sum.prefetched += layer.prefetched;
    sum.prefetch_used += layer.prefetch_used;
    sum.prefetch_late += layer.prefetch_late;
    sum.prefetch_wasted += layer.prefetch_wasted;
    sum.prefetch_regretted += layer.prefetch_regretted;
  }
  return sum;
}

bool is_whole(const LayerTable& table) {
  return table.n_resident() + table.device().n_resident() == table.n_experts();
}

}  // namespace

void Prefetch::Latest::set(LayerIndex layer, std::span<const ExpertIndex> experts) noexcept {
  layer_ = layer;
  n_ = experts.size() <= experts_.size() ? static_cast<std::uint32_t>(experts.size()) : 0;
  std::copy_n(experts.begin(), n_, experts_.begin());
}

Prefetch::Prefetch(std::span<const LayerShape> layers, const PrefetchPace& pace)
    : pays(static_cast<std::uint32_t>(layers.size()), pace) {
  std::uint32_t widest = 0;
  for (const LayerShape& layer : layers) widest = std::max(widest, layer.n_experts);
  candidates.reserve(widest);
  predictors_.reserve(layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerShape& before = layers[(i + layers.size() - 1) % layers.size()];
    predictors_.emplace_back(before.n_experts, layers[i].n_experts);
  }
}

void Prefetch::teach(const Latest& before, LayerIndex layer, std::span<const ExpertIndex> experts) noexcept {
  // Not if the lane went another way: prompts are not followed, and a client may do as it likes.
  if (before.experts().empty() || behind(before.layer()) != layer) return;
  if (experts.size() > NextLayerPredictor::kEventExpertsMax) return;
  predictors_[layer.value].teach(before.experts(), experts);
}

// Behind the event itself: what the lane asks for has been started.
void Brain::State::look_ahead(LaneId id, LayerIndex index, std::span<const ExpertIndex> experts) {
  LaneState& lane = lanes[id.value];
  ModelState& model = *lane.model;
  if (model.prefetch == nullptr) return;
  Prefetch& prefetch = *model.prefetch;
  if (prefetch.pays.count_event()) prefetch.pays.judge(prefetches_of(model.counters));
  if (!prefetch.pays.learns()) {
    lane.latest.clear();
    return;
  }
  if (!is_whole(model.layers[index.value].table)) prefetch.teach(lane.latest, index, experts);
  lane.latest.set(index, experts);
  if (!prefetch.pays.may_start() || lane.latest.experts().empty()) return;

  LayerState& target = layer_of(model, prefetch.behind(index));
  LayerTable& table = target.table;
  // Behind the leases that wait, as promotions are.
  if (is_whole(table) || !target.queue.empty()) return;
  const std::span<const float> likelihood = prefetch.predict(lane.latest);
  std::vector<ExpertIndex>& candidates = prefetch.candidates;
  candidates.clear();
  for (std::uint32_t e = 0; e < table.n_experts(); ++e) {
    if (likelihood[e] >= Prefetch::kLikelihoodMin && table.is_absent(ExpertIndex(e)))
      candidates.emplace_back(e);
  }
  if (candidates.empty()) return;
  std::ranges::sort(candidates, [&](ExpertIndex a, ExpertIndex b) {
    return likelihood[a.value] != likelihood[b.value] ? likelihood[a.value] > likelihood[b.value] : a < b;
  });
  std::uint32_t n_coming = 0;
  for (const LayerState& each : model.layers) n_coming += each.table.n_coming();
  for (const ExpertIndex expert : candidates) {
    if (n_coming >= Prefetch::kComingMax || table.n_coming() >= Prefetch::kComingOfLayerMax) return;
    if (table.prefetch(expert, likelihood, commands)) ++n_coming;
  }
}

PrefetchState Brain::prefetch(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  if (model == nullptr || model->prefetch == nullptr) return PrefetchState::kOff;
  return model->prefetch->pays.state();
}

}  // namespace moecached
