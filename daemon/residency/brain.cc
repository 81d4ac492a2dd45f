#include "daemon/residency/brain.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/policy/registry.h"
#include "daemon/residency/brain_state.h"

namespace moecached {
namespace {

constexpr std::uint32_t kLanesMax = 1u << 16;  // a lane id beyond it is a bug of the shell: they are dense

// One policy per layer, or the fault of the first that cannot be made.
Result<std::vector<std::unique_ptr<EvictionPolicy>>> make_policies(const std::string& spec,
                                                                   std::span<const LayerShape> layers,
                                                                   const PolicyLibraries* libraries) {
  std::vector<std::unique_ptr<EvictionPolicy>> policies;
  policies.reserve(layers.size());
  for (const LayerShape& layer : layers) {
    auto policy = make_policy(spec, {.n_experts = layer.n_experts, .n_slots = layer.n_slots}, libraries);
    if (!policy) return std::move(policy).error();
    policies.push_back(std::move(policy).value());
  }
  return policies;
}

// The same layers, for policies of slots that are not there yet.
std::vector<LayerShape> with_one_slot(std::span<const LayerShape> layers) {
  std::vector<LayerShape> shapes(layers.begin(), layers.end());
  for (LayerShape& shape : shapes) shape.n_slots = 1;
  return shapes;
}

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

}  // namespace

Brain::Brain(const PolicyLibraries* libraries) : state_(std::make_unique<State>()) {
  state_->libraries = libraries;
}
Brain::~Brain() = default;

ModelState* Brain::State::find_model(ModelId id) const {
  const auto found = models.find(id);
  return found == models.end() ? nullptr : found->second.get();
}

LaneState& Brain::State::open_lane(LaneId lane) {
  CHECK(lane.value < lanes.size() && lanes[lane.value].is_open);
  return lanes[lane.value];
}

LayerState& Brain::State::layer_of(ModelState& model, LayerIndex layer) {
  CHECK(layer.value < model.layers.size());
  return model.layers[layer.value];
}

// -------------------------------------------------------------------------------------------------
// configuration

Status Brain::add_model(ModelId id, const ModelShape& shape) {
  const std::string name = "model " + std::to_string(id.value);
  if (state_->find_model(id) != nullptr) return invalid(name + " is there already");
  if (shape.layers.empty()) return invalid(name + " has no MoE layer");
  std::uint32_t n_slots_max = 0, n_experts_max = 0;
  for (std::size_t i = 0; i < shape.layers.size(); ++i) {
    const LayerShape& layer = shape.layers[i];
    if (layer.n_slots == 0 || layer.n_slots > layer.n_experts) {
      return invalid(name + ", MoE layer " + std::to_string(i) + ": " + std::to_string(layer.n_slots) +
                     " slots for " + std::to_string(layer.n_experts) +
                     " experts; it needs 1 up to one per expert");
    }
    if (layer.room() < layer.n_slots || layer.room() > layer.n_experts) {
      return invalid(name + ", MoE layer " + std::to_string(i) + ": room for " +
                     std::to_string(layer.room()) + " slots, " + std::to_string(layer.n_slots) +
                     " of them open, for " + std::to_string(layer.n_experts) + " experts");
    }
    n_slots_max = std::max(n_slots_max, layer.room());
    n_experts_max = std::max(n_experts_max, layer.n_experts);
  }
  auto policies = make_policies(shape.policy, shape.layers, state_->libraries);
  if (!policies) return std::move(policies).error().with_context(name);
  auto device_policies = make_policies(shape.device_policy, with_one_slot(shape.layers), state_->libraries);
  if (!device_policies) return std::move(device_policies).error().with_context(name + ", device slots");

  auto model = std::make_unique<ModelState>();
  model->policy = shape.policy;
  model->device_policy = shape.device_policy;
  model->n_slots_max = n_slots_max;
  model->n_expert_used = shape.n_expert_used;
  if (shape.scope == SlotScope::kGlobal) model->trader = std::make_unique<SlotTrader>(shape);
  model->marks.resize(n_experts_max);
  model->counters.resize(shape.layers.size());
  model->layers.reserve(shape.layers.size());
  for (std::uint32_t i = 0; i < shape.layers.size(); ++i) {
    model->layers.push_back({.table = LayerTable({.model = id, .layer = LayerIndex(i)}, shape.layers[i],
                                                 std::move((*policies)[i]), model->counters[i]),
                             .queue = {},
                             .loading = {},
                             .shape = shape.layers[i],
                             .closing_for = {},
                             .n_promised = 0});
    model->layers.back().table.replace_device_policy(std::move((*device_policies)[i]));
  }
  if (shape.prefetch) model->prefetch = std::make_unique<Prefetch>(shape.layers, shape.prefetch_pace);
  state_->models.emplace(id, std::move(model));
  return ok();
}

void Brain::remove_model(ModelId id) {
  const ModelState* model = state_->find_model(id);
  if (model == nullptr) return;
  CHECK(model->n_open_lanes == 0);
  for (const auto& [other, reader] : state_->models) {
    if (std::erase(reader->peers, model) > 0) State::tell_peers(*reader);
  }
  state_->models.erase(id);
  // What the shell has not taken yet would name slots that it is about to free.
  std::erase_if(state_->commands, [id](const Command& command) { return command.model == id; });
}

Status Brain::State::set_policies(std::span<const ModelId> ids, const std::string& spec, bool is_device) {
  using Policies = std::vector<std::unique_ptr<EvictionPolicy>>;
  std::vector<std::pair<ModelState*, Policies>> ready;
  for (const ModelId id : ids) {
    ModelState* model = find_model(id);
    if (model == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id.value)};
    std::vector<LayerShape> shapes;
    shapes.reserve(model->layers.size());
    for (const LayerState& layer : model->layers) {
      const LayerTable& table = layer.table;
      shapes.push_back({.n_experts = table.n_experts(),
                        .n_slots = is_device ? std::max(table.device().n_slots(), 1u) : table.n_slots()});
    }
    auto policies = make_policies(spec, shapes, libraries);
    if (!policies) return std::move(policies).error();
    ready.emplace_back(model, std::move(policies).value());
  }
  for (auto& [model, policies] : ready) {
    for (std::size_t i = 0; i < policies.size(); ++i) {
      LayerTable& table = model->layers[i].table;
      is_device ? table.replace_device_policy(std::move(policies[i]))
                : table.replace_policy(std::move(policies[i]));
    }
    (is_device ? model->device_policy : model->policy) = spec;
  }
  return ok();
}

Status Brain::set_policy(std::span<const ModelId> ids, const std::string& spec) {
  return state_->set_policies(ids, spec, false);
}

Status Brain::set_device_policy(std::span<const ModelId> ids, const std::string& spec) {
  return state_->set_policies(ids, spec, true);
}

Status Brain::seed(ModelId id, std::span<const std::vector<double>> uses_per_step) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id.value)};
  for (std::size_t i = 0; i < std::min(uses_per_step.size(), model->layers.size()); ++i)
    model->layers[i].table.seed_history(uses_per_step[i]);
  if (Status set = set_policy(id, std::string(model->policy)); !set) return set;
  return set_device_policy({&id, 1}, std::string(model->device_policy));
}

void Brain::set_peers(ModelId id, std::span<const ModelId> peers, double cost) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return;
  model->peers.clear();
  model->peer_cost = cost;
  for (const ModelId peer : peers) {
    if (ModelState* other = state_->find_model(peer); other != nullptr && other != model)
      model->peers.push_back(other);
  }
  const auto has_device_slots = [](const LayerState& layer) { return layer.table.device().n_slots() > 0; };
  for (const ModelState* peer : model->peers)
    CHECK(std::ranges::none_of(peer->layers, has_device_slots) &&
          std::ranges::none_of(model->layers, has_device_slots));
  State::tell_peers(*model);
}

void Brain::State::tell_peers(ModelState& model) {
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    std::vector<const LayerTable*> tables;
    for (const ModelState* peer : model.peers) {
      CHECK(peer->layers.size() == model.layers.size());
      tables.push_back(&peer->layers[l].table);
    }
    model.layers[l].table.set_peers(std::move(tables), model.peer_cost);
  }
}

// --------------------------------------------------------------------------------------------------------
// events

void Brain::lane_opened(LaneId id, ModelId model_id) {
  CHECK(id.value < kLanesMax);
  ModelState* model = state_->find_model(model_id);
  CHECK(model != nullptr);
  if (id.value >= state_->lanes.size()) {
    state_->lanes.resize(id.value + 1);
    state_->links.resize(id.value + 1);
  }
  LaneState& lane = state_->lanes[id.value];
  CHECK(!lane.is_open && lane.lease.state == LeaseState::kNone);
  lane.is_open = true;
  lane.model_id = model_id;
  lane.model = model;
  lane.completed = 0;
  lane.latest.clear();
  lane.lease.experts.reserve(model->n_slots_max);
  ++model->n_open_lanes;
}

void Brain::lane_closed(LaneId id) {
  LaneState& lane = state_->open_lane(id);
  state_->drop(id);
  state_->drop_holds(id, UINT64_MAX);
  --lane.model->n_open_lanes;
  lane.is_open = false;
  lane.model = nullptr;
  // Ids are used again: an answer that the shell has not taken yet must not reach the next owner of this one.
  std::erase_if(state_->commands, [id](const Command& command) {
    return command.kind == CommandKind::kGrant && command.lane == id;
  });
}

void Brain::routed(LaneId id, LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase) {
  ModelState& model = *state_->open_lane(id).model;
  (void)State::layer_of(model, layer).table.touch(experts, phase);
  if (model.trader && phase == Phase::kDecode) model.trader->use(layer, experts);
  if (phase != Phase::kDecode) return;
  for (ModelState* peer : model.peers) State::layer_of(*peer, layer).table.observe(experts);
  state_->look_ahead(id, layer, experts);
}

void Brain::lease(LaneId id, LayerIndex layer_index, std::span<const ExpertIndex> experts, std::uint32_t seq,
                  std::uint64_t epoch, Phase phase) {
  LaneState& lane = state_->open_lane(id);
  ModelState& model = *lane.model;
  LayerState& layer = State::layer_of(model, layer_index);
  for (ExpertIndex expert : experts) {
    CHECK(expert.value < layer.table.n_experts() && model.marks[expert.value] == 0);  // in range and distinct
    model.marks[expert.value] = 1;
  }
  for (ExpertIndex expert : experts) model.marks[expert.value] = 0;

  // Counted before the older lease is dropped: what that sets off is a later event.
  const Step step = layer.table.touch(experts, phase);
  if (model.trader && phase == Phase::kDecode) model.trader->use(layer_index, experts);
  ++model.counters[layer_index.value].leases;
  state_->drop(id);
  lane.lease.layer = layer_index;
  lane.lease.seq = seq;
  lane.lease.epoch = epoch;
  lane.lease.step = step;
  lane.lease.phase = phase;
  state_->ask(id, experts);
  if (phase == Phase::kDecode) state_->look_ahead(id, layer_index, experts);
}

void Brain::epoch_completed(LaneId id, std::uint64_t completed) {
  LaneState& lane = state_->open_lane(id);
  lane.completed = std::max(lane.completed, completed);
  // One that is not granted yet stays: its lane waits for the answer.
  if (lane.lease.state == LeaseState::kGranted && lane.lease.epoch <= lane.completed) state_->drop(id);
  state_->drop_holds(id, lane.completed);
}

double Brain::promotion_gain(ModelId id, LayerIndex layer, ExpertIndex expert, Phase phase) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return 0;
  LayerState& state = State::layer_of(*model, layer);
  return state.queue.empty() ? state.table.promotion_gain(expert, phase) : 0;
}

bool Brain::promote(ModelId id, LayerIndex layer, ExpertIndex expert, Phase phase) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return false;
  LayerState& state = State::layer_of(*model, layer);
  // Behind the leases that wait: promotions without end would keep the slots of a large one from ever coming
  // together.
  return state.queue.empty() && state.table.promote(expert, state_->commands, phase);
}

void Brain::set_costs(ModelId id, LayerIndex layer, const PolicyCosts& costs) {
  if (ModelState* model = state_->find_model(id)) State::layer_of(*model, layer).table.set_costs(costs);
}

void Brain::grace_done(ModelId id, LayerIndex layer, SlotIndex slot) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return;
  LayerState& from = State::layer_of(*model, layer);
  switch (from.table.grace_done(slot, state_->commands)) {
    case LayerTable::Grace::kNothing:
      return;
    case LayerTable::Grace::kFreed:
      return state_->serve_queue(from);
    case LayerTable::Grace::kClosed: {
      // Behind kRelease: its memory is the other layer's.
      LayerState& to = State::layer_of(*model, from.closing_for);
      --to.n_promised;
      to.table.open_slots(1);
      return state_->serve_queue(to);
    }
  }
}

Brain::Reload Brain::slot_corrupt(ModelId id, LayerIndex layer_index, SlotIndex slot, ExpertIndex expert) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return Reload::kGone;
  LayerTable& table = State::layer_of(*model, layer_index).table;
  if (!table.is_in(slot, expert)) return Reload::kGone;
  return table.reload(slot, expert, state_->commands) ? Reload::kReading : Reload::kPinned;
}

void Brain::read_done(ModelId id, LayerIndex layer_index, SlotIndex slot, ReadOutcome outcome) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return;
  LayerState& layer = State::layer_of(*model, layer_index);
  if (const auto expert = layer.table.read_done(slot, outcome, state_->commands)) {
    state_->load_ended(layer, *expert, outcome);
  }
}

std::span<const Command> Brain::take_commands() {
  state_->taken.clear();
  std::swap(state_->taken, state_->commands);
  return state_->taken;
}

// ---------------------------------------------------------------------------------------------------------
// views

// Those of a model that is not there are empty: who asks may have learnt of the model before it was removed.

std::span<const LayerCounters> Brain::counters(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  return model == nullptr ? std::span<const LayerCounters>()
                          : std::span<const LayerCounters>(model->counters);
}

std::uint32_t Brain::resident(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model == nullptr ? 0 : State::layer_of(*model, layer).table.n_resident();
}

std::uint32_t Brain::free_slots(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model == nullptr ? 0 : State::layer_of(*model, layer).table.n_free();
}

std::uint32_t Brain::slots(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model == nullptr ? 0 : State::layer_of(*model, layer).table.n_slots();
}

bool Brain::is_absent(ModelId id, LayerIndex layer, ExpertIndex expert) const {
  ModelState* model = state_->find_model(id);
  return model != nullptr && State::layer_of(*model, layer).table.is_absent(expert);
}

bool Brain::is_resident(ModelId id, LayerIndex layer, ExpertIndex expert) const {
  ModelState* model = state_->find_model(id);
  return model != nullptr && State::layer_of(*model, layer).table.is_resident(expert);
}

bool Brain::is_elsewhere(ModelId id, LayerIndex layer, ExpertIndex expert) const {
  ModelState* model = state_->find_model(id);
  return model != nullptr && State::layer_of(*model, layer).table.is_elsewhere(expert);
}

std::vector<std::vector<double>> Brain::use_rates(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  std::vector<std::vector<double>> out;
  if (model == nullptr) return out;
  for (const LayerState& layer : model->layers) out.push_back(layer.table.use_rates());
  return out;
}

std::uint32_t Brain::coming(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  std::uint32_t n = 0;
  if (model == nullptr) return n;
  for (const LayerState& layer : model->layers) n += layer.table.n_coming();
  return n;
}

std::string Brain::policy(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  return model == nullptr ? std::string() : model->policy;
}

std::string Brain::device_policy(ModelId id) const {
  const ModelState* model = state_->find_model(id);
  return model == nullptr ? std::string() : model->device_policy;
}

}  // namespace moecached
