// Device slots: when they are added, and which experts are worth an upload into them.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "daemon/ipc/gpu_service_state.h"
#include "daemon/platform/clock.h"
#include "daemon/residency/promotion.h"

namespace moecached {
namespace {

// What the copy engine moves at 55 GB/s, the fetch kernel reads at 48.
constexpr double kInPlacePerCopyRate = 0.87;
constexpr std::uint64_t kCostsEveryNs = 100'000'000;

}  // namespace

void GpuService::start_growth(Entry& entry) {
  if (entry.device->lost || entry.growth != Entry::Growth::kNone) return;
  if (entry.growth_failed_ns != 0 && monotonic_ns() - entry.growth_failed_ns < 10 * kGpuStalledAfterNs)
    return;
  const std::shared_ptr<GpuModel> model = entry.model;
  std::vector<std::shared_ptr<GpuModel>> others;
  for (const auto& [id, other] : models_) {
    if (other->device == entry.device && other->model != model) others.push_back(other->model);
  }
  entry.growth = Entry::Growth::kAllocating;
  auto growth = std::make_shared<Pending::Growth>();
  const GpuOptions& options = config_.gpu;
  GpuQueue::Job job;
  job.call = [model, growth, others, &options] {
    auto memory = model->gpu().memory_info();
    if (!memory) {
      growth->outcome = std::move(memory).error();
      return;
    }
    // What an earlier try has left allocated is this model's to use.
    const std::uint64_t free = memory->free + model->device_bytes();
    std::uint64_t budget = free > options.keep_free ? free - options.keep_free : 0;
    std::uint64_t taken = 0;
    for (const auto& other : others) taken += other->device_bytes();
    if (options.bytes > 0) budget = std::min(budget, options.bytes > taken ? options.bytes - taken : 0);
    growth->n_slots = gpu_slots_that_fit(model->layout(), model->plans(), model->wanted(), budget,
                                         model->gpu().granularity());
    growth->outcome = model->grow(growth->n_slots);
  };
  Pending pending;
  pending.kind = Pending::Kind::kGrow;
  pending.model = model;
  pending.growth = std::move(growth);
  submit(*model, std::move(job), std::move(pending));
}

void GpuService::growth_done(Entry& entry, const Status& outcome, const std::vector<std::uint32_t>& n_slots) {
  const bool any = std::ranges::any_of(n_slots, [](std::uint32_t n) { return n > 0; });
  if (!outcome || !any) {
    entry.growth = Entry::Growth::kNone;
    entry.growth_failed_ns = monotonic_ns();
    entry.growth_note =
        outcome ? "no device memory within gpu.bytes and gpu.keep_free" : outcome.error().text;
    spdlog::warn("model {}: no device slots: {}; trying again in 10 s", entry.model->id().value,
                 entry.growth_note);
    return;
  }
  entry.growth_note = n_slots == entry.model->wanted()
                          ? ""
                          : "fewer device slots than gpu.slots asks for fit into device memory";
  entry.model->publish_growth(n_slots);
  // Epochs that were begun before may not have the new memory mapped, and need not: they are in the shape
  // HOST_ONLY, which does not look at the table. Whoever takes up another shape maps first.
  GpuModel& model = *entry.model;
  if (Status added = brain_.add_model(model.id(), shape_of(entry)); !added) {
    spdlog::error("model {}: {}", model.id().value, added.error().text);
    entry.growth_note = added.error().text;
    entry.growth = Entry::Growth::kDone;
    return;
  }
  entry.has_slots = true;
  entry.growth = Entry::Growth::kDone;
  start_prewarm(entry);
  // A layer that is to be wholly resident stays as it is until it is, so that its shape is stock's all the
  // time.
  for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l) {
    const std::uint32_t n = model.n_slots()[l];
    if (n > 0 && n < model.layout().layers[l].n_experts)
      model.set_shape(LayerIndex(l), MOECACHED_SHAPE_MIXED);
  }
  std::uint64_t total = 0;
  for (const std::uint32_t n : model.n_slots()) total += n;
  spdlog::info("model {} ({}): {} device slots, {} MiB of device memory", model.id().value, model.name(),
               total, model.device_bytes() >> 20);
}

void GpuService::check_all_resident(Entry& entry) {
  GpuModel& model = *entry.model;
  for (std::uint32_t l = 0; l < entry.all_resident.size(); ++l) {
    const LayerIndex layer(l);
    const std::uint32_t n_experts = model.layout().layers[l].n_experts;
    if (entry.all_resident[l] != 0 || model.n_slots()[l] < n_experts || entry.publishing[l] != 0) continue;
    if (brain_.resident(model.id(), layer) < n_experts) continue;
    bool in_order = true;
    for (std::uint32_t e = 0; e < n_experts && in_order; ++e)
      in_order = model.expert_in(layer, static_cast<std::int32_t>(e)) == e;
    if (!in_order) continue;
    entry.all_resident[l] = 1;
    model.set_shape(layer, MOECACHED_SHAPE_ALL_RESIDENT);
  }
}

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
    if (model.n_slots()[layer.value] < n_experts || entry.fill_expert >= n_experts) {
      ++entry.fill_layer;
      entry.fill_expert = 0;
      continue;
    }
    if (!brain_.promote(model.id(), layer, ExpertIndex(entry.fill_expert))) break;
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
    if (model.n_slots()[step.layer.value] == 0 || brain_.free_slots(model.id(), step.layer) == 0) continue;
    if (brain_.promote(model.id(), step.layer, step.expert)) ++entry.promotions;
  }
  for (const auto& [key, lane] : lanes_) {
    // Its slots cannot be had while it does not move; every victim would wait for it.
    if (lane->entry == &entry && now_ns - lane->begun_since_ns > kGpuStalledAfterNs &&
        load_word(lane->words->completed) < lane->begun >> 16) {
      entry.candidates.clear();
      return;
    }
  }
  const auto place = [](const Entry::Candidate& c) { return std::pair(c.layer, c.expert); };
  // Of doubles the one of decode comes first, and stays.
  std::ranges::sort(entry.candidates, {},
                    [](const Entry::Candidate& c) { return std::tuple(c.layer, c.expert, c.phase); });
  const auto doubles = std::ranges::unique(entry.candidates, {}, place);
  entry.candidates.erase(doubles.begin(), doubles.end());
  for (Entry::Candidate& candidate : entry.candidates)
    candidate.gain =
        model.n_slots()[candidate.layer.value] == 0
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

ModelShape GpuService::shape_of(const Entry& entry) {
  const GpuModel& model = *entry.model;
  ModelShape shape{.layers = {}, .policy = entry.policy};
  for (std::size_t l = 0; l < model.layout().layers.size(); ++l)
    shape.layers.push_back({model.layout().layers[l].n_experts, std::max(1u, model.n_slots()[l])});
  return shape;
}

ModelShape GpuService::shape(ModelId id) const {
  const auto found = models_.find(id.value);
  return found == models_.end() || !found->second->has_slots ? ModelShape{} : shape_of(*found->second);
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
  for (const std::uint32_t n : entry.model->n_slots()) n_slots += n;
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
    if (entry.model->n_slots()[layer.value] > 0 && brain_.promote(entry.model->id(), layer, expert))
      ++entry.promotions;
  }
}

}  // namespace moecached
