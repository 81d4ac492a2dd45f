#include "daemon/ipc/comparison.h"

#include <algorithm>
#include <cstdio>

#include "daemon/residency/belady.h"
#include "daemon/residency/layer_use.h"

namespace moecached {
namespace {

std::string points(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", 100 * share);
  return text;
}

double share(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

void score_window(const EventWindow::LayerEvents& events, std::uint32_t n_experts, LayerComparison* out,
                  std::vector<std::uint64_t>* counts) {
  std::vector<std::span<const std::uint16_t>> spans;
  counts->assign(n_experts, 0);
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < events.ends.size(); ++i) {
    const std::uint32_t end = events.ends[i];
    spans.push_back(std::span(events.ids).subspan(begin, end - begin));
    for (const std::uint16_t id : spans.back()) ++(*counts)[id];
    for (std::size_t p = 0; p < out->policies.size(); ++p)
      out->policies[p].window_hits += events.hits[i] >> (16 * p) & 0xffff;
    begin = end;
  }
  out->window_lookups = events.ids.size();
  for (const BeladyOutcome& outcome : belady(spans, n_experts, out->n_slots, true)) {
    out->belady_hits += outcome.hits;
    out->belady_uploads += outcome.insertions;
  }
  for (const BeladyOutcome& outcome : belady(spans, n_experts, std::max(1u, out->n_slots * 3 / 4), true))
    out->belady_hits_fewer += outcome.hits;
  const LayerUse use = use_of_counts(*counts);
  out->gini = use.gini;
  out->entropy_bits = use.entropy_bits;
}

}  // namespace

EventWindow::EventWindow(std::shared_ptr<RoutingTap> tap, std::size_t n_layers, std::size_t ids_max)
    : tap_(std::move(tap)), ids_max_(ids_max), layers_(n_layers) {}

void EventWindow::drain() {
  RoutingEvent event;
  while (tap_->take(&event, &experts_)) {
    if (n_ids_ + experts_.size() > ids_max_) forget_older_half();
    LayerEvents& layer = layers_[event.layer.value];
    for (const std::uint32_t expert : experts_) layer.ids.push_back(static_cast<std::uint16_t>(expert));
    layer.ends.push_back(static_cast<std::uint32_t>(layer.ids.size()));
    layer.hits.push_back(event.lane);
    n_ids_ += experts_.size();
  }
}

void EventWindow::forget_older_half() {
  for (LayerEvents& layer : layers_) {
    const std::size_t n = (layer.ends.size() + 1) / 2;
    if (n == 0) continue;
    const std::uint32_t cut = layer.ends[n - 1];
    layer.ids.erase(layer.ids.begin(), layer.ids.begin() + cut);
    layer.ends.erase(layer.ends.begin(), layer.ends.begin() + static_cast<std::ptrdiff_t>(n));
    layer.hits.erase(layer.hits.begin(), layer.hits.begin() + static_cast<std::ptrdiff_t>(n));
    for (std::uint32_t& end : layer.ends) end -= cut;
    n_ids_ -= cut;
    forgotten_ += cut;
  }
}

PolicyComparison compare(const ShadowSnapshot& snapshot, const EventWindow& window) {
  PolicyComparison out;
  out.policies = snapshot.policies;
  out.dropped = window.dropped();
  out.forgotten = window.forgotten();
  std::size_t first = 0;
  std::vector<std::uint64_t> counts;
  for (std::size_t l = 0; l < snapshot.shape.layers.size(); ++l) {
    const LayerShape& shape = snapshot.shape.layers[l];
    LayerComparison& layer = out.layers.emplace_back();
    layer.block = snapshot.blocks[l];
    layer.n_experts = shape.n_experts;
    layer.n_slots = shape.n_slots;
    layer.policies.resize(snapshot.policies.size());
    score_window(window.layers()[l], shape.n_experts, &layer, &counts);
    for (std::size_t p = 0; p < layer.policies.size(); ++p) {
      PolicyScore& score = layer.policies[p];
      const LayerCounters& counters = snapshot.counters[p][l];
      score.lookups = counters.lookups;
      score.hits = counters.hits;
      score.uploads = counters.insertions;
      score.link_experts = counters.insertions + (snapshot.mode == MissMode::kCovered ? counters.misses : 0);
      for (std::uint32_t e = 0; e < shape.n_experts; ++e)
        score.covered += snapshot.resident[p][first + e] != 0 ? counts[e] : 0;
    }
    first += shape.n_experts;
  }
  out.advice = advice(out, snapshot.n_expert_used);
  return out;
}

std::vector<std::string> advice(const PolicyComparison& comparison, std::uint32_t n_expert_used) {
  // Fewer events say nothing yet.
  constexpr std::uint64_t kLookupsMin = 1000;
  // Of hits, in points for each hundredth of the experts in slots: below, memory is better spent elsewhere.
  constexpr double kKnee = 0.1;
  constexpr double kClearlyBetter = 0.01;
  std::vector<std::string> out;
  std::uint64_t lookups = 0, best = 0, best_with_fewer = 0, slots = 0, fewer = 0, experts = 0;
  const LayerComparison* smallest = nullptr;
  std::vector<std::uint64_t> hits(comparison.policies.size());
  for (const LayerComparison& layer : comparison.layers) {
    lookups += layer.window_lookups;
    best += layer.belady_hits;
    best_with_fewer += layer.belady_hits_fewer;
    slots += layer.n_slots;
    fewer += std::max(1u, layer.n_slots * 3 / 4);
    experts += layer.n_experts;
    for (std::size_t p = 0; p < hits.size(); ++p) hits[p] += layer.policies[p].window_hits;
    if (layer.n_slots < std::min(2 * n_expert_used, layer.n_experts) &&
        (smallest == nullptr || layer.n_slots < smallest->n_slots))
      smallest = &layer;
  }
  if (smallest != nullptr) {
    out.push_back("layer " + std::to_string(smallest->block) + " has " + std::to_string(smallest->n_slots) +
                  " slots, fewer than twice the " + std::to_string(n_expert_used) +
                  " experts of a token: most lookups miss, whatever the policy; have at least " +
                  std::to_string(std::min(2 * n_expert_used, smallest->n_experts)));
  }
  if (lookups < kLookupsMin) {
    out.push_back("only " + std::to_string(lookups) + " lookups so far: too few to judge by");
    return out;
  }
  const double lost = share(best - std::min(best, best_with_fewer), lookups);
  const double freed = share(slots - fewer, experts);
  if (freed > 0 && lost / freed < kKnee) {
    out.push_back(
        "the slots are past the knee: with three quarters of them the best that is possible would "
        "lose " +
        points(lost) + " points of hits; that memory may be better spent elsewhere");
  }
  const auto winner = std::max_element(hits.begin(), hits.end());
  const double gain = share(*winner - hits.front(), lookups);
  if (gain >= kClearlyBetter) {
    out.push_back(comparison.policies[static_cast<std::size_t>(winner - hits.begin())] + " would hit " +
                  points(gain) + " points more than " + comparison.policies.front());
  }
  return out;
}

}  // namespace moecached
