// The shell's part in device slots: spare slots, and the copies by which experts move up and come down.
#include <algorithm>

#include "tests/sim/fake_shell.h"

namespace moecached::sim {

void FakeShell::set_device_policy(ModelId id, const std::string& spec, bool is_valid) {
  world_.trace.note("set device policy", {id.value, spec.size(), is_valid});
  const std::string before = brain_.device_policy(id);
  const bool is_set = static_cast<bool>(brain_.set_device_policy({&id, 1}, spec));
  expect(is_set == is_valid, ViolationKind::kBadCommand, "a policy was accepted or refused wrongly");
  expect(brain_.device_policy(id) == (is_valid ? spec : before), ViolationKind::kBadCommand,
         "the wrong policy is in force");
  if (is_valid) ++world_.stats.device_policy_swaps;
  after_event();
}

void FakeShell::open_device_slots(ModelId id, LayerIndex index, std::uint32_t n) {
  world_.trace.note("open device slots", {id.value, index.value, n});
  FakeLayer& layer = world_.layer(id, index);
  layer.device_slots.resize(layer.device_slots.size() + n);
  layer.device_busy.resize(layer.device_slots.size());
  brain_.open_device_slots(id, index, n);
  expect(brain_.device_slots(id, index) == layer.device_slots.size(), ViolationKind::kWrongCount,
         "device slots");
  world_.stats.device_slots_opened += n;
  after_event();
}

void FakeShell::rise(ModelId model, LayerIndex index, std::span<const ExpertIndex> used) {
  const auto spare =
      std::find_if(spares_.begin(), spares_.end(), [](const Spare& each) { return !each.is_lent; });
  if (spare == spares_.end()) return;
  const bool was_rising = brain_.is_rising(model, index);
  const double gain_min = world_.rng.below(4) != 0 ? -1 : world_.rng.below(200) / 1000.0;
  world_.trace.note("rise", {model.value, index.value, used.size()});
  if (!brain_.rise(model, index, used, gain_min, static_cast<std::uint32_t>(spare - spares_.begin()))) {
    ++world_.stats.rises_refused;
    return;
  }
  expect(!was_rising && brain_.is_rising(model, index), ViolationKind::kBadCommand, "two moves in one layer");
  *spare = {
      .is_lent = true, .model = model, .layer = index, .falling = kNobody, .rising_from = {}, .bytes = {}};
}

FakeShell::Spare* FakeShell::find_spare(ModelId model, LayerIndex layer, std::int32_t falling) {
  const auto spare = std::find_if(spares_.begin(), spares_.end(), [&](const Spare& each) {
    return each.is_lent && each.model == model && each.layer == layer && each.falling == falling;
  });
  return spare == spares_.end() ? nullptr : &*spare;
}

void FakeShell::reclaim_spares() {
  for (std::size_t i = 0; i < spares_.size(); ++i) {
    if (!spares_[i].is_lent || !world_.models.at(spares_[i].model).is_removed) continue;
    const auto uses = [i](const auto& each) { return each.spare == static_cast<std::int32_t>(i); };
    if (std::any_of(copies_.begin(), copies_.end(), uses) || std::any_of(reads_.begin(), reads_.end(), uses))
      continue;
    spares_[i].is_lent = false;
  }
}

void FakeShell::finish_copy(std::size_t i) {
  const Copy copy = copies_[i];
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
  const Place& place = copy.place;
  FakeModel& model = world_.models.at(place.model);
  FakeLayer& layer = model.layers[place.layer.value];
  SlotBytes& device = layer.bytes_at(place.slot.value);
  const bool is_up = copy.from >= 0;
  const SlotBytes& source = is_up ? layer.bytes_at(static_cast<std::uint32_t>(copy.from)) : device;
  SlotBytes& target = is_up ? device : spares_[static_cast<std::size_t>(copy.spare)].bytes;
  target = {.is_torn = source.is_torn || source.serial != copy.serial,
            .expert = source.expert,
            .serial = ++read_serial_};
  if (is_up) layer.busy_at(place.slot.value) = 0;
  if (model.is_removed) ++world_.stats.late_completions;
  world_.trace.note("moved", {place.model.value, place.layer.value, place.slot.value, is_up});
  brain_.moved(place.model, place.layer, place.slot);
  after_event();
  reclaim_spares();
}

void FakeShell::copy_up(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  expect_idle(command);
  const auto named = static_cast<std::int32_t>(command.slot.value);
  expect(std::find(layer.table.begin(), layer.table.end(), named) == layer.table.end(),
         ViolationKind::kBadCommand, "copy into a slot that the table names");
  const auto from = static_cast<std::int32_t>(command.from.value);
  expect(layer.table[command.expert.value] == from, ViolationKind::kBadCommand,
         "an expert rises from where it is not");
  layer.busy_at(command.slot.value) = 1;
  layer.bytes_at(command.slot.value).is_torn = true;
  copies_.push_back({.place = {.model = command.model, .layer = command.layer, .slot = command.slot},
                     .expert = command.expert,
                     .from = from,
                     .spare = -1,
                     .serial = layer.bytes_at(command.from.value).serial,
                     .due = world_.now + world_.rng.below(world_.options.copy_delay_ticks_max + 1)});
}

void FakeShell::copy_aside(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  expect_idle(command);
  expect(find_spare(command.model, command.layer, static_cast<std::int32_t>(command.expert.value)) ==
             &spares_.at(static_cast<std::size_t>(command.spare)),
         ViolationKind::kBadCommand, "copy into a spare slot that was not lent for it");
  expect(layer.table[command.expert.value] == kAbsent && layer.holds(command.slot.value, command.expert),
         ViolationKind::kBadCommand, "an expert falls from where it is not");
  copies_.push_back({.place = {.model = command.model, .layer = command.layer, .slot = command.slot},
                     .expert = command.expert,
                     .from = -1,
                     .spare = command.spare,
                     .serial = layer.bytes_at(command.slot.value).serial,
                     .due = world_.now + world_.rng.below(world_.options.copy_delay_ticks_max + 1)});
}

void FakeShell::move(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  std::int32_t& entry = layer.table[command.expert.value];
  expect(entry == static_cast<std::int32_t>(command.from.value) && layer.busy_at(command.from.value) == 0,
         ViolationKind::kBadCommand, "an expert rises from where it is not");
  expect(layer.holds(command.slot.value, command.expert), ViolationKind::kUntruthfulPublish,
         "move to a slot without the expert's bytes");
  expect_idle(command);
  entry = static_cast<std::int32_t>(command.slot.value);
  layer.busy_at(command.from.value) = 1;
  ++world_.stats.rises;
  for (Spare& spare : spares_) {
    if (!spare.is_lent || spare.model != command.model || spare.layer != command.layer) continue;
    spare.rising_from = command.from;
    world_.stats.swaps += spare.falling != kNobody ? 1 : 0;
  }
  Grace grace;
  grace.place = {.model = command.model, .layer = command.layer, .slot = command.from};
  grace.leaving = command.expert;
  grace.has_risen = true;
  graces_.push_back(std::move(grace));
}

void FakeShell::free_spare(const Command& command) {
  Spare& spare = spares_.at(static_cast<std::size_t>(command.spare));
  expect(spare.is_lent && spare.model == command.model && spare.layer == command.layer,
         ViolationKind::kBadCommand, "a spare slot is freed that was not lent");
  const bool is_lost =
      spare.falling != kNobody &&
      world_.layer(command.model, command.layer).table[static_cast<std::size_t>(spare.falling)] == kAbsent;
  world_.stats.falls_given_up += is_lost ? 1 : 0;
  spare.is_lent = false;
}

}  // namespace moecached::sim
