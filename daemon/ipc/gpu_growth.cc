// Device slots: when they are added, and to which layers. Memory comes last: nothing is allocated before a
// client's graphs have run once. Later more are added for layers that this GPU computes since then, for
// memory that has become free, and, with scope global, to the layers that need them most. They are never
// taken away.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "daemon/ipc/gpu_service_state.h"
#include "daemon/platform/clock.h"

namespace moecached {
namespace {

constexpr std::uint64_t kAgainAfterNs = 10'000'000'000;
// A host that computes a model in several graphs has run them all by then.
constexpr std::uint64_t kFirstPassNs = 1'000'000'000;
// Scope global: so much of an even share comes first. The rest comes when the routing of so many tokens is
// known.
constexpr double kFirstShare = 0.75;
constexpr std::uint64_t kTokensBeforeSharing = 512;
// What would add less than this part of what is wanted is not worth a mapping in every client.
constexpr std::uint64_t kSmallestPart = 16;

std::uint64_t sum(std::span<const std::uint32_t> values) {
  return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
}

}  // namespace

bool GpuService::wants_growth(const Entry& entry, std::uint64_t now_ns) {
  if (entry.is_growing() || entry.device->lost || entry.first_log_ns == 0) return false;
  if (entry.device->spill_use.is_allocating) return false;
  if (entry.growth == Entry::Growth::kNone) {
    if (entry.growth_tried_ns != 0) return now_ns - entry.growth_tried_ns >= kAgainAfterNs;
    return entry.passed_twice || now_ns - entry.first_log_ns > kFirstPassNs ||
           sum(wanted_of(entry)) == sum(entry.model->wanted());
  }
  if (entry.scope == SlotScope::kGlobal && !entry.shared_out && entry.decoded >= kTokensBeforeSharing)
    return true;
  if (entry.growth_is_over || now_ns - entry.growth_tried_ns < kAgainAfterNs) return false;
  return sum(entry.n_open) < sum(wanted_of(entry));
}

// An even share of what is asked for, of the layers that this GPU computes. One that computes most of a model
// computes all of it: the last layer of a prompt may be for fewer tokens than the others, and is then not
// logged.
std::vector<std::uint32_t> GpuService::wanted_of(const Entry& entry) {
  std::vector<std::uint32_t> wanted = entry.model->wanted();
  const auto n_seen =
      static_cast<std::size_t>(std::ranges::count_if(entry.seen, [](auto seen) { return seen != 0; }));
  if (n_seen * 4 >= entry.seen.size() * 3) return wanted;
  for (std::size_t l = 0; l < wanted.size(); ++l) {
    const bool is_last_of_seen = l + 1 == wanted.size() && l > 0 && entry.seen[l - 1] != 0;
    if (entry.seen[l] == 0 && !is_last_of_seen) wanted[l] = 0;
  }
  return wanted;
}

void GpuService::start_growth(Entry& entry, std::uint64_t now_ns) {
  const std::shared_ptr<GpuModel> model = entry.model;
  std::vector<std::shared_ptr<GpuModel>> others;
  for (const auto& [id, other] : models_) {
    if (other->device == entry.device && other->model != model) others.push_back(other->model);
  }
  auto growth = std::make_shared<Growth>();
  const bool is_first = !entry.has_slots;
  const bool global = entry.scope == SlotScope::kGlobal;
  // Decided with the evidence of now; what memory allows is found out on the queue's thread.
  std::vector<std::uint32_t> shared;
  if (global && !is_first && !entry.shared_out && entry.decoded >= kTokensBeforeSharing) {
    shared = brain_.share_out(model->id(), entry.even);
    entry.shared_out = true;
  }
  const bool keeps_rest = global && !entry.shared_out;
  entry.growth = Entry::Growth::kAllocating;
  entry.growth_tried_ns = now_ns;
  const GpuOptions& options = config_.gpu;
  GpuQueue::Job job;
  job.call = [model, growth, others, shared, keeps_rest, is_first, wanted = wanted_of(entry),
              have = entry.n_open, spill_bytes = entry.device->spill_use.bytes, &options] {
    auto memory = model->gpu().memory_info();
    if (!memory) {
      growth->outcome = std::move(memory).error();
      return;
    }
    // What an earlier try has left allocated is this model's to use.
    const std::uint64_t free = memory->free + model->device_bytes();
    std::uint64_t budget = free > options.keep_free ? free - options.keep_free : 0;
    std::uint64_t taken = spill_bytes;
    for (const auto& other : others) taken += other->device_bytes();
    if (options.bytes > 0) budget = std::min(budget, options.bytes > taken ? options.bytes - taken : 0);
    const std::uint64_t granularity = model->gpu().granularity();
    growth->even = gpu_slots_that_fit(model->layout(), model->plans(), wanted, budget, granularity);
    std::vector<std::uint32_t> n = growth->even;
    if (!shared.empty() && gpu_device_bytes(model->layout(), model->plans(), shared, granularity) <= budget)
      n = shared;
    for (std::size_t l = 0; l < n.size(); ++l) {
      if (keeps_rest && n[l] < model->layout().layers[l].n_experts)
        n[l] = std::max(std::min(n[l], 1u), static_cast<std::uint32_t>(n[l] * kFirstShare));
      n[l] = std::max(n[l], have[l]);
    }
    // What was shared out is more than even in some layers: together with an even share of the others too
    // much.
    if (gpu_device_bytes(model->layout(), model->plans(), n, granularity) >
        std::max(budget, model->device_bytes()))
      n = have;
    const std::uint64_t added = sum(n) - sum(have);
    if (!is_first && shared.empty() && n != wanted && added * kSmallestPart < sum(wanted)) n = have;
    growth->n_slots = n;
    if (n != have) growth->outcome = model->grow(n);
  };
  Pending pending;
  pending.kind = Pending::Kind::kGrow;
  pending.model = model;
  pending.growth = std::move(growth);
  submit(*model, std::move(job), std::move(pending));
}

void GpuService::growth_done(Entry& entry, const Growth& growth) {
  const bool any = std::ranges::any_of(growth.n_slots, [](std::uint32_t n) { return n > 0; });
  if (!growth.outcome || !any) {
    entry.growth = entry.has_slots ? Entry::Growth::kDone : Entry::Growth::kNone;
    entry.growth_is_over =
        entry.has_slots && !growth.outcome && growth.outcome.error().code == FaultCode::kUnsupported;
    entry.growth_note =
        growth.outcome ? "no device memory within gpu.bytes and gpu.keep_free" : growth.outcome.error().text;
    spdlog::warn("model {}: no {}device slots: {}{}", entry.model->id().value, entry.has_slots ? "more " : "",
                 entry.growth_note, entry.growth_is_over ? "" : "; trying again in 10 s");
    return;
  }
  entry.even = growth.even;
  entry.growth_note = growth.even == wanted_of(entry)
                          ? ""
                          : "fewer device slots than gpu.slots asks for fit into device memory";
  if (growth.n_slots == entry.n_open) {
    entry.growth = Entry::Growth::kDone;
    return;
  }
  entry.model->publish_growth(growth.n_slots);
  // Lanes that begin from now on map the new memory first. One that is in an epoch may meet a slot in the
  // table that it has not mapped, so none is used before it has come to the end: but for layers that had
  // none, whose graphs do not look at the table; with peers, whose slots it may name, all may look.
  bool looked_at = !entry.peers.empty();
  for (std::size_t l = 0; l < entry.n_open.size(); ++l)
    looked_at = looked_at || (entry.n_open[l] > 0 && growth.n_slots[l] > entry.n_open[l]);
  if (!looked_at) {
    open_slots(entry);
    return;
  }
  entry.growth = Entry::Growth::kMapping;
  begin_grace(growth_grace_, {.model = entry.model->id(), .layer = {}, .slot = {}, .expert = {}}, &grown_);
  slots_mapped();
}

void GpuService::slots_mapped() {
  for (const GraceTicket& ticket : std::exchange(grown_, {})) {
    Entry* entry = find_entry(ticket.model);
    if (entry == nullptr) continue;
    if (ticket.slot.value == 0) {
      open_slots(*entry);
    } else {
      peer_mapped(*entry, ticket.slot.value - 1);  // as map_peer numbers them
    }
  }
}

void GpuService::open_slots(Entry& entry) {
  GpuModel& model = *entry.model;
  entry.growth = Entry::Growth::kDone;
  const std::vector<std::uint32_t> before =
      std::exchange(entry.n_open, std::vector<std::uint32_t>(model.n_slots().begin(), model.n_slots().end()));
  if (!entry.has_slots) {
    if (Status added = brain_.add_model(model.id(), shape_of(entry)); !added) {
      spdlog::error("model {}: {}", model.id().value, added.error().text);
      entry.growth_note = added.error().text;
      entry.n_open = before;
      return;
    }
    entry.has_slots = true;
    tell_brain_of_peers(entry);
    for (const Entry* reader : readers_of(entry)) tell_brain_of_peers(*reader);
    start_prewarm(entry);
  } else {
    for (std::uint32_t l = 0; l < before.size(); ++l)
      brain_.open_slots(model.id(), LayerIndex(l), std::max(1u, entry.n_open[l]) - std::max(1u, before[l]));
    entry.fill_layer = entry.fill_expert = 0;  // layers that fit as a whole now
  }
  ++entry.slots_version;
  // A layer that is to be wholly resident stays as it is until it is, so that its shape is stock's all the
  // time.
  for (std::uint32_t l = 0; l < before.size(); ++l) {
    const bool begins = before[l] == 0 && entry.n_open[l] > 0;
    if (begins && entry.n_open[l] < model.layout().layers[l].n_experts)
      model.set_shape(LayerIndex(l), MOECACHED_SHAPE_MIXED);
  }
  spdlog::info("model {} ({}): {} device slots, {} MiB of device memory", model.id().value, model.name(),
               sum(entry.n_open), model.device_bytes() >> 20);
}

void GpuService::check_all_resident(Entry& entry) {
  GpuModel& model = *entry.model;
  for (std::uint32_t l = 0; l < entry.all_resident.size(); ++l) {
    const LayerIndex layer(l);
    const std::uint32_t n_experts = model.layout().layers[l].n_experts;
    if (entry.all_resident[l] != 0 || entry.n_open[l] < n_experts || entry.publishing[l] != 0) continue;
    if (brain_.resident(model.id(), layer) < n_experts) continue;
    bool in_order = true;
    for (std::uint32_t e = 0; e < n_experts && in_order; ++e) in_order = model.put_into(layer, e) == e;
    if (!in_order) continue;
    entry.all_resident[l] = 1;
    model.set_shape(layer, MOECACHED_SHAPE_ALL_RESIDENT);
  }
}

// The brain has no layer without a slot: one that has none yet gets an address that nothing is promoted to.
ModelShape GpuService::shape_of(const Entry& entry) {
  const GpuModel& model = *entry.model;
  ModelShape shape{.layers = {},
                   .policy = entry.policy,
                   .scope = entry.scope,
                   .n_expert_used = model.layout().n_expert_used};
  for (std::size_t l = 0; l < model.layout().layers.size(); ++l) {
    const LayerLayout& layer = model.layout().layers[l];
    const std::uint32_t n = std::max(1u, entry.n_open[l]);
    shape.layers.push_back({.n_experts = layer.n_experts,
                            .n_slots = n,
                            .n_slots_max = std::max(n, model.plans()[l].n_device_max),
                            .slot_class = layer.slot_class});
  }
  return shape;
}

// For challengers, which load into as many slots as there are: nothing is traded on a GPU.
ModelShape GpuService::shape(ModelId id) const {
  const auto found = models_.find(id.value);
  if (found == models_.end() || !found->second->has_slots) return {};
  ModelShape shape = shape_of(*found->second);
  shape.scope = SlotScope::kLayer;
  for (LayerShape& layer : shape.layers) layer.n_slots_max = layer.n_slots;
  return shape;
}

}  // namespace moecached
