// Moves between RAM and device slots: one at a time in a layer, an expert up and, where no device slot is
// free, another one down. See brain.h for the order of what the shell does.
#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/residency/brain_state.h"
#include "daemon/residency/layer_table.h"

namespace moecached {

using Stage = DeviceSlots::Stage;

void LayerTable::open_device_slots(std::uint32_t n) {
  CHECK(n_closing_ == 0 && peers_.empty());
  CHECK(device_.n_slots() + n <= n_experts());
  const bool is_first = device_.n_slots() == 0 && n > 0;
  device_.open(n);
  if (is_first) tell_past(device_.policy(), Tier::kDevice);
}

// Before there are device slots it is told nothing.
void LayerTable::replace_device_policy(std::unique_ptr<EvictionPolicy> policy) {
  if (device_.n_slots() > 0) tell_past(*policy, Tier::kDevice);
  device_.set_policy(std::move(policy));
}

bool LayerTable::rise(std::span<const ExpertIndex> used, double gain_min, std::int32_t spare,
                      std::vector<Command>& commands) {
  if (device_.is_moving()) return false;
  // Not one that a stalled lane may be reading: its RAM slot would be out of service for as long as that lane
  // likes. Nor what only a prompt or nobody has used.
  const auto may_rise = [this](ExpertIndex index) {
    const Expert& expert = at(index);
    return is_in_ram(expert) && expert.holds == 0 && !expert.is_prompts && !expert.is_ahead;
  };
  if (std::ranges::none_of(used, may_rise)) return false;
  const bool is_swap = !device_.has_free();
  std::optional<ExpertIndex> falling;
  if (is_swap) {
    falling = device_.choose_victim([this](ExpertIndex expert) { return at(expert).pins == 0; });
    if (!falling) return false;
  }
  ExpertIndex rising = kNobody;
  double gain_max = 0;
  for (const ExpertIndex index : used) {
    if (!may_rise(index)) continue;
    const double gain = is_swap ? device_.policy().gain(index, *falling) : history_.rate(index);
    if (is_swap && gain <= gain_min) continue;
    if (rising != kNobody && gain <= gain_max) continue;
    rising = index;
    gain_max = gain;
  }
  if (rising == kNobody) return false;

  const SlotIndex from = at(rising).slot;
  if (at(rising).pins++ == 0) --n_evictable_;
  device_.begin(rising, from, falling, spare);
  if (is_swap) {
    at(*falling).state = ExpertState::kComing;
    commands.push_back(make_command(CommandKind::kUnpublish, *falling, device_.move().slot));
  } else {
    command_copy_up(commands);
  }
  return true;
}

void LayerTable::command_copy_up(std::vector<Command>& commands) const {
  const DeviceSlots::Move& move = device_.move();
  Command command = make_command(CommandKind::kCopyUp, move.rising, move.slot);
  command.from = move.from;
  commands.push_back(command);
}

void LayerTable::device_grace_done(SlotIndex index, std::vector<Command>& commands) {
  const DeviceSlots::Move& move = device_.move();
  if (move.stage != Stage::kEmptying || move.slot != index) return;
  device_.copy_aside();
  Command command = make_command(CommandKind::kCopyAside, *move.falling, index);
  command.spare = move.spare;
  commands.push_back(command);
}

void LayerTable::moved(SlotIndex index, std::vector<Command>& commands) {
  const DeviceSlots::Move& move = device_.move();
  if (move.slot != index) return;
  if (move.stage == Stage::kCopyingAside) {
    device_.copy_up();
    command_copy_up(commands);
    return;
  }
  if (move.stage != Stage::kCopyingUp) return;
  Expert& rising = at(move.rising);
  policy_->on_remove(move.rising);
  device_.risen(rising.last_step);
  rising.slot = index;
  rising.inserted_step = rising.last_step;
  --rising.pins;
  --n_resident_;
  if (rising.holds > 0) --n_held_;  // what is held now is no RAM slot
  Slot& from = at(move.from);
  from.state = SlotState::kLeaving;
  from.expert = move.falling.value_or(kNobody);
  from.is_ahead = false;  // that was of the read which the rising one came by
  if (move.falling) at(*move.falling).slot = move.from;
  ++counters_.rises;
  counters_.swaps += move.falling ? 1 : 0;
  Command command = make_command(CommandKind::kMove, move.rising, index);
  command.from = move.from;
  commands.push_back(command);
}

LayerTable::Grace LayerTable::vacated(SlotIndex index, std::vector<Command>& commands) {
  Slot& slot = at(index);
  if (slot.state == SlotState::kLeaving && slot.expert != kNobody) {
    device_.land();
    command_read(slot.expert, index, commands);
    return Grace::kNothing;
  }
  if (slot.state == SlotState::kLeaving) {
    end_move(commands);
  } else {
    --n_stalled_;
  }
  slot.state = SlotState::kFree;
  free_.push_back(index);
  return Grace::kFreed;
}

void LayerTable::put_back(std::vector<Command>& commands) {
  const DeviceSlots::Move move = device_.move();
  Expert& falling = at(*move.falling);
  falling.state = ExpertState::kResident;
  falling.inserted_step = falling.last_step = step_;  // a lane uses it right now
  device_.put_back(step_);
  commands.push_back(make_command(CommandKind::kPublish, *move.falling, move.slot));
  unpin({&move.rising, 1});
  command_spare_freed(move.spare, commands);
}

bool LayerTable::keep_for_stalled(SlotIndex index, std::vector<Command>& commands) {
  Slot& slot = at(index);
  const ExpertIndex falling = slot.expert;
  slot.state = SlotState::kStalled;
  ++n_stalled_;
  if (falling == kNobody) {
    end_move(commands);
    return true;
  }
  device_.land();
  at(falling).state = ExpertState::kAbsent;
  if (free_.empty()) {
    if (n_evictable_ == 0) {
      give_up_falling(commands);
      return false;
    }
    choose_victims(1, kNobody, Phase::kDecode);
  }
  place(falling, step_, commands);
  return true;
}

void LayerTable::give_up_falling(std::vector<Command>& commands) {
  ++counters_.evictions;
  end_move(commands);
}

void LayerTable::end_move(std::vector<Command>& commands) {
  const std::int32_t spare = device_.move().spare;
  device_.end();
  command_spare_freed(spare, commands);
}

void LayerTable::command_spare_freed(std::int32_t spare, std::vector<Command>& commands) const {
  Command command = make_command(CommandKind::kSpareFreed, kNobody, SlotIndex());
  command.spare = spare;
  commands.push_back(command);
}

std::optional<SlotIndex> LayerTable::slot_of(ExpertIndex expert) const {
  if (!is_resident(expert)) return std::nullopt;
  return at(expert).slot;
}

// ---------------------------------------------------------------------------------------------------------
// events

void Brain::open_device_slots(ModelId id, LayerIndex index, std::uint32_t n) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return;
  CHECK(!model->trader);
  for (const auto& [other, reader] : state_->models)
    CHECK(std::ranges::find(reader->peers, model) == reader->peers.end());
  LayerState& layer = State::layer_of(*model, index);
  layer.table.open_device_slots(n);
  // A lease may name as many more experts.
  model->n_slots_max =
      std::max(model->n_slots_max, layer.table.n_slots_max() + layer.table.device().n_slots());
  for (LaneState& lane : state_->lanes) {
    if (lane.model == model) lane.lease.experts.reserve(model->n_slots_max);
  }
}

bool Brain::rise(ModelId id, LayerIndex index, std::span<const ExpertIndex> used, double gain_min,
                 std::uint32_t spare) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return false;
  CHECK(spare <= INT32_MAX);
  LayerState& layer = State::layer_of(*model, index);
  // Behind the leases that wait, as promotions are: they counted on what is in device slots.
  return layer.queue.empty() && layer.table.device().n_slots() > 0 &&
         layer.table.rise(used, gain_min, static_cast<std::int32_t>(spare), state_->commands);
}

void Brain::moved(ModelId id, LayerIndex layer, SlotIndex slot) {
  if (ModelState* model = state_->find_model(id))
    State::layer_of(*model, layer).table.moved(slot, state_->commands);
}

// ---------------------------------------------------------------------------------------------------------
// views

std::uint32_t Brain::device_resident(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model == nullptr ? 0 : State::layer_of(*model, layer).table.device().n_resident();
}

std::uint32_t Brain::device_slots(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model == nullptr ? 0 : State::layer_of(*model, layer).table.device().n_slots();
}

bool Brain::is_rising(ModelId id, LayerIndex layer) const {
  ModelState* model = state_->find_model(id);
  return model != nullptr && State::layer_of(*model, layer).table.device().is_moving();
}

std::optional<SlotIndex> Brain::slot_of(ModelId id, LayerIndex layer, ExpertIndex expert) const {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return std::nullopt;
  return State::layer_of(*model, layer).table.slot_of(expert);
}

}  // namespace moecached
