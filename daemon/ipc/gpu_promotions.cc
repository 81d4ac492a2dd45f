// Which experts are worth an upload into device slots.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "daemon/ipc/gpu_service_state.h"
#include "daemon/platform/clock.h"
#include "daemon/residency/promotion.h"

namespace moecached {
namespace {

constexpr std::uint64_t kCostsEveryNs = 100'000'000;

}  // namespace

void GpuService::tell_costs(Entry& entry, std::uint64_t now_ns) {
  if (now_ns - entry.costs_told_ns < kCostsEveryNs) return;
  entry.costs_told_ns = now_ns;
  const UploadBudget& budget = entry.device->budget;
  for (std::uint32_t l = 0; l < entry.model->layout().layers.size(); ++l) {
    const LayerIndex layer(l);
    const double upload_ns = static_cast<double>(entry.model->expert_bytes(layer)) / budget.link_rate() * 1e9;
    brain_.set_costs(entry.model->id(), layer,
                     {.miss_ns = upload_ns / kInPlacePerCopyRate,
                      .upload_ns = upload_ns,
                      .link_busy = budget.link_busy()});
  }
}

void GpuService::promote(Entry& entry, std::uint64_t now_ns) {
  GpuModel& model = *entry.model;
  tell_costs(entry, now_ns);
  entry.promotions = brain_.coming(model.id());
  // Each promotion is at most a few jobs; the queue's bound must never be met.
  if (entry.device->queue->room() < 8 * kPromotionsMax) return;
  // Everything fits: in order, so that expert e gets slot e and the layer has stock's shape again.
  while (entry.fill_layer < entry.all_resident.size() && entry.promotions < kPromotionsMax) {
    const LayerIndex layer(entry.fill_layer);
    const std::uint32_t n_experts = model.layout().layers[layer.value].n_experts;
    if (entry.n_open[layer.value] < n_experts || entry.fill_expert >= n_experts) {
      ++entry.fill_layer;
      entry.fill_expert = 0;
      continue;
    }
    const ExpertIndex expert(entry.fill_expert);
    if (brain_.is_absent(model.id(), layer, expert) && !brain_.promote(model.id(), layer, expert)) break;
    ++entry.fill_expert;
    ++entry.promotions;
  }
  if (entry.fill_layer < entry.all_resident.size()) {
    entry.candidates.clear();
    return;
  }
  if (test_churn_) {
    churn(entry);
    return;
  }
  // Half of what may be under way: what is used now need not wait for what was used once.
  while (!entry.plan.is_done() && entry.promotions < kPromotionsMax / 2) {
    const PrewarmPlan::Step step = entry.plan.take();
    if (entry.n_open[step.layer.value] == 0 || brain_.free_slots(model.id(), step.layer) == 0 ||
        brain_.is_elsewhere(model.id(), step.layer, step.expert))
      continue;
    if (brain_.promote(model.id(), step.layer, step.expert)) ++entry.promotions;
  }
  // Its slots cannot be had while it does not move; every victim would wait for it.
  const std::vector<Entry*> readers = readers_of(entry);
  if (has_stalled_lane(entry, now_ns) ||
      std::ranges::any_of(readers, [&](const Entry* reader) { return has_stalled_lane(*reader, now_ns); })) {
    entry.candidates.clear();
    return;
  }
  const auto place = [](const Entry::Candidate& c) { return std::pair(c.layer, c.expert); };
  // Of doubles the one of decode comes first, and stays.
  std::ranges::sort(entry.candidates, {},
                    [](const Entry::Candidate& c) { return std::tuple(c.layer, c.expert, c.phase); });
  const auto doubles = std::ranges::unique(entry.candidates, {}, place);
  entry.candidates.erase(doubles.begin(), doubles.end());
  for (Entry::Candidate& candidate : entry.candidates)
    candidate.gain =
        entry.n_open[candidate.layer.value] == 0
            ? 0
            : brain_.promotion_gain(model.id(), candidate.layer, candidate.expert, candidate.phase);
  std::erase_if(entry.candidates, [](const Entry::Candidate& c) { return c.gain < kPromotionGainMin; });
  std::sort(entry.candidates.begin(), entry.candidates.end());
  for (const Entry::Candidate& candidate : entry.candidates) {
    if (entry.promotions >= kPromotionsMax) break;
    const bool into_free_slot = candidate.gain == std::numeric_limits<double>::infinity();
    const std::uint64_t bytes = model.expert_bytes(candidate.layer);
    if (!into_free_slot && !entry.device->budget.allows(bytes)) break;
    // Asked again: promotions of this round have changed what is worth it.
    if (brain_.promotion_gain(model.id(), candidate.layer, candidate.expert, candidate.phase) <
        kPromotionGainMin)
      continue;
    if (!brain_.promote(model.id(), candidate.layer, candidate.expert, candidate.phase)) continue;
    entry.device->budget.uploaded(bytes);
    ++entry.promotions;
  }
  entry.candidates.clear();
}

void GpuService::start_prewarm(Entry& entry) {
  if (entry.warm.layers.empty()) return;
  const ModelId id = entry.model->id();
  if (Status seeded = brain_.seed(id, rates_of(entry.warm, entry.model->layout().n_expert_used)); !seeded)
    spdlog::error("model {}: {}", id.value, seeded.error().text);
  entry.plan = PrewarmPlan(entry.warm, brain_, id);
  entry.warm = {};
}

Result<std::uint64_t> GpuService::prewarm(ModelId id, const UseList& list) {
  Entry* entry = find_entry(id);
  if (entry == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id.value)};
  entry->warm = list;
  if (!entry->has_slots) return std::uint64_t{0};
  start_prewarm(*entry);
  return std::uint64_t{entry->plan.size()};
}

// Random promotions as fast as the link takes them; half of the slots rest meanwhile, so that they are read.
void GpuService::churn(Entry& entry) {
  std::uint32_t n_slots = 0;
  for (const std::uint32_t n : entry.n_open) n_slots += n;
  const std::uint32_t most = std::min<std::uint32_t>(kPromotionsMax, std::max(1u, n_slots / 2));
  auto random = [this] {
    churn_state_ ^= churn_state_ << 13;
    churn_state_ ^= churn_state_ >> 7;
    churn_state_ ^= churn_state_ << 17;
    return churn_state_;
  };
  const auto n_layers = static_cast<std::uint32_t>(entry.all_resident.size());
  for (int tries = 0; tries < 200 && entry.promotions < most; ++tries) {
    const LayerIndex layer(static_cast<std::uint32_t>(random() % n_layers));
    const ExpertIndex expert(
        static_cast<std::uint32_t>(random() % entry.model->layout().layers[layer.value].n_experts));
    if (entry.n_open[layer.value] > 0 && brain_.promote(entry.model->id(), layer, expert)) ++entry.promotions;
  }
}

}  // namespace moecached
