#include "tests/sim/fake_shell.h"

#include <algorithm>
#include <limits>

namespace moecached::sim {

// ---------------------------------------------------------------------------------------------------
// configuration

void FakeShell::add_model(ModelId id, const ModelShape& shape) {
  expect(static_cast<bool>(brain_.add_model(id, shape)), ViolationKind::kBadCommand,
         "a good model was refused");
  FakeModel model;
  for (const LayerShape& layer : shape.layers) {
    model.layers.push_back({.shape = layer,
                            .table = std::vector<std::int32_t>(layer.n_experts, kAbsent),
                            .slots = std::vector<SlotBytes>(layer.room()),
                            .device_slots = {},
                            .busy = std::vector<std::uint8_t>(layer.room()),
                            .device_busy = {},
                            .backed = std::vector<std::uint8_t>(layer.room()),
                            .n_device_max = 0,
                            .n_open = layer.n_slots,
                            .n_open_fewest = layer.n_slots,
                            .has_been_held = false,
                            .expected = {}});
  }
  for (const LayerShape& layer : shape.layers) model.n_backed_max[layer.slot_class] += layer.n_slots;
  world_.models.emplace(id, std::move(model));
  after_event();
}

void FakeShell::remove_model(ModelId id) {
  for (std::uint32_t i = 0; i < n_lanes(); ++i) {
    FakeLane* client = lane(i);
    if (client == nullptr || client->model() != id) continue;
    if (client->phase() != FakeLane::Phase::kDead) client->die();
    close_lane(i);
  }
  world_.trace.note("remove model", {id.value});
  for (std::uint32_t i = 0; i < world_.models.at(id).layers.size(); ++i)
    world_.stats.removed_while_rising += brain_.is_rising(id, LayerIndex(i)) ? 1 : 0;
  brain_.remove_model(id);
  ++world_.stats.models_removed;
  world_.models.at(id).is_removed = true;
  after_event();
  for (const Grace& grace : graces_) {
    if (grace.place.model != id) continue;
    ++world_.stats.late_completions;
    brain_.grace_done(id, grace.place.layer, grace.place.slot);
    after_event();
  }
  std::erase_if(graces_, [id](const Grace& grace) { return grace.place.model == id; });
  reclaim_spares();
}

void FakeShell::set_policy(ModelId id, const std::string& spec, bool is_valid) {
  world_.trace.note("set policy", {id.value, spec.size(), is_valid});
  const std::string before = brain_.policy(id);
  const bool is_set = static_cast<bool>(brain_.set_policy(id, spec));
  expect(is_set == is_valid, ViolationKind::kBadCommand, "a policy was accepted or refused wrongly");
  expect(brain_.policy(id) == (is_valid ? spec : before), ViolationKind::kBadCommand,
         "the wrong policy is in force");
  ++(is_valid ? world_.stats.policy_swaps : world_.stats.policies_refused);
  after_event();
}

void FakeShell::open_lane(std::uint32_t id, ModelId model, FakeLane::Kind kind) {
  Lane& lane = lanes_[id];
  lane = {};
  lane.opening = ++n_openings_;
  lane.client = std::make_unique<FakeLane>(world_, model, kind);
  world_.trace.note("open lane", {id, model.value, static_cast<std::uint64_t>(kind)});
  brain_.lane_opened(LaneId(id), model);
  after_event();
}

void FakeShell::close_lane(std::uint32_t id) {
  world_.trace.note("close lane", {id});
  lanes_[id].client.reset();
  lanes_[id].is_pending = false;
  brain_.lane_closed(LaneId(id));
  after_event();
}

// ------------------------------------------------------------------------------------------------------------
// work

void FakeShell::poll_epoch(std::uint32_t id) {
  FakeLane* client = lane(id);
  if (client == nullptr) return;
  world_.trace.note("completed", {id, client->words.completed});
  brain_.epoch_completed(LaneId(id), client->words.completed);
  after_event();
}

void FakeShell::note_lookups(FakeLayer& layer, const Record& record) const {
  LayerCounters& expected = layer.expected;
  expected.lookups += record.ids.size();
  if (record.is_lease) ++expected.leases;
  for (ExpertIndex expert : record.ids) {
    const std::int32_t slot = layer.table[expert.value];
    ++(slot == kAbsent ? expected.misses : expected.hits);
    if (slot >= static_cast<std::int32_t>(kDeviceSlot)) ++expected.device_hits;
  }
}

void FakeShell::drain_record(std::uint32_t id) {
  FakeLane* client = lane(id);
  if (client == nullptr || client->words.ring.empty()) return;
  const Record record = std::move(client->words.ring.front());
  client->words.ring.pop_front();
  world_.trace.note(record.is_lease ? "lease" : "routed",
                    {id, record.layer.value, record.ids.size(), record.seq});
  note_lookups(world_.layer(client->model(), record.layer), record);
  Lane& lane = lanes_[id];
  lane.use_epoch = record.epoch;
  lane.use_layer = record.layer;
  lane.use_ids = record.ids;
  if (record.is_lease) {
    lane.pending_seq = record.seq;
    lane.pending_ids = record.ids;
    lane.pending_layer = record.layer;
    lane.has_seen_io_error = false;
    lane.has_seen_change = false;
    lane.is_pending = true;
    lane.pending_phase = record.phase();
    for (ExpertIndex expert : record.ids) {
      const auto falling = static_cast<std::int32_t>(expert.value);
      world_.stats.leases_of_falling += find_spare(client->model(), record.layer, falling) != nullptr ? 1 : 0;
    }
    brain_.lease(LaneId(id), record.layer, record.ids, record.seq, record.epoch, record.phase());
    // As the core does it.
    if (world_.options.trade_permille > 0 && brain_.trade_slots(client->model(), record.layer))
      ++world_.stats.trades_by_routing;
  } else {
    brain_.routed(LaneId(id), record.layer, record.ids, record.phase());
  }
  // Asked first: the runs of seeds without device slots stay what they were.
  if (world_.options.rise_permille > 0 && record.phase() == Phase::kDecode &&
      world_.rng.permille(world_.options.rise_permille))
    rise(client->model(), record.layer, record.ids);
  after_event();
}

void FakeShell::look_at_lanes(Grace& grace) const {
  grace.has_looked = true;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    const FakeLane* client = lanes_[i].client.get();
    if (client == nullptr || client->model() != grace.place.model) continue;
    const LaneWords& words = client->words;
    if (words.begun_layer != kLayerAll && words.begun_layer != grace.place.layer.value) continue;
    if (words.completed >= words.begun_epoch) continue;
    grace.waits.push_back({.lane = i, .opening = lanes_[i].opening, .epoch = words.begun_epoch});
  }
  if (!grace.waits.empty()) ++world_.stats.graces_waited;
}

bool FakeShell::is_over(const Grace& grace) const {
  return std::all_of(grace.waits.begin(), grace.waits.end(), [&](const Grace::Wait& wait) {
    const Lane& lane = lanes_[wait.lane];
    if (lane.client == nullptr || lane.opening != wait.opening || lane.client->words.completed >= wait.epoch)
      return true;
    // Its record of this epoch names other experts.
    const bool is_known_unused =
        lane.use_epoch == wait.epoch && lane.use_layer == grace.place.layer &&
        std::find(lane.use_ids.begin(), lane.use_ids.end(), grace.leaving) == lane.use_ids.end();
    if (is_known_unused) ++world_.stats.known_unused;
    return is_known_unused;
  });
}

// As the daemon's core does it: a lane that a grace period waits for and that stays in its epoch keeps what
// it may be using, and whoever wanted the slot gets another.
void FakeShell::watch_stalls() {
  struct Stalled {
    std::uint32_t lane;
    Place place;
    ExpertIndex leaving;
  };
  std::vector<Stalled> stalled;
  for (const Grace& grace : graces_) {
    for (const Grace::Wait& wait : grace.waits) {
      Lane& lane = lanes_[wait.lane];
      if (lane.client == nullptr || lane.opening != wait.opening) continue;
      if (has_stalled(lane))
        stalled.push_back({.lane = wait.lane, .place = grace.place, .leaving = grace.leaving});
    }
  }
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    // Pending: granted, but with the answer among the commands that are not carried out yet.
    if (lanes_[i].client == nullptr || lanes_[i].is_pending || !brain_.blocks_others(LaneId(i))) continue;
    if (!has_stalled(lanes_[i])) continue;
    world_.trace.note("stalled in a lease", {i});
    ++world_.stats.held_leases;
    note_hold(i, lanes_[i].leased_layer);
    brain_.hold_lease(LaneId(i));
    brain_.check_invariants();
    carry_out_commands();
  }
  for (const Stalled& each : stalled) give_up_on(each.lane, each.place, each.leaving);
}

bool FakeShell::has_stalled(Lane& lane) const {
  const std::uint64_t begun = lane.client->words.begun_epoch;
  if (lane.stalled_since == 0 || lane.stalled_epoch != begun) {
    lane.stalled_since = world_.now + 1;  // 0: never
    lane.stalled_epoch = begun;
    return false;
  }
  return world_.now - lane.stalled_since + 1 > world_.options.stall_after_ticks;
}

void FakeShell::give_up_on(std::uint32_t id, const Place& place, ExpertIndex leaving) {
  FakeLayer& layer = world_.layer(place.model, place.layer);
  const auto forget_grace = [&] {
    std::erase_if(graces_, [&](const Grace& grace) {
      return grace.place.model == place.model && grace.place.layer == place.layer &&
             grace.place.slot == place.slot;
    });
  };
  world_.trace.note("stalled", {id, place.model.value, place.layer.value, place.slot.value});
  if (world_.options.stalled_is_gone) {
    forget_grace();
    brain_.grace_done(place.model, place.layer, place.slot);
    return after_event();
  }
  Lane& lane = lanes_[id];
  const std::uint64_t epoch = lane.stalled_epoch;
  std::vector<ExpertIndex> uses = lane.use_ids;
  if (lane.use_epoch != epoch || lane.use_layer != place.layer) {  // it may use anything
    uses.clear();
    for (std::uint32_t i = 0; i < layer.shape.n_experts; ++i) uses.emplace_back(i);
    ++world_.stats.held_whole;
  }
  note_hold(id, place.layer);
  brain_.hold(LaneId(id), place.layer, uses, epoch);
  brain_.check_invariants();
  const std::uint32_t n_open = brain_.slots(place.model, place.layer);
  if (brain_.undo_eviction({place.model, place.layer, place.slot, leaving}, LaneId(id), epoch)) {
    ++(place.slot.value < kDeviceSlot ? world_.stats.undone : world_.stats.rises_undone);
    if (brain_.slots(place.model, place.layer) > n_open) ++world_.stats.trades_undone;
    forget_grace();
    layer.busy_at(place.slot.value) = 0;
  } else {
    if (brain_.slots(place.model, place.layer) < n_open) ++world_.stats.drained;
    brain_.hold(LaneId(id), place.layer, {&leaving, 1}, epoch);
    for (Grace& grace : graces_) {
      if (!grace.has_risen || grace.is_given_up || grace.place.model != place.model ||
          grace.place.layer != place.layer || grace.place.slot != place.slot)
        continue;
      grace.is_given_up = true;
      ++world_.stats.ram_slots_stalled;
    }
  }
  if (brain_.has_lease_until(LaneId(id), nullptr)) ++world_.stats.held;
  brain_.check_invariants();
  carry_out_commands();
}

void FakeShell::promote(ModelId model, LayerIndex index, ExpertIndex expert) {
  world_.trace.note("promote", {model.value, index.value, expert.value});
  const FakeLayer& layer = world_.layer(model, index);
  const bool is_seen_resident = layer.table[expert.value] != kAbsent;
  const double gain = brain_.promotion_gain(model, index, expert);
  const std::uint32_t n_coming = brain_.coming(model);
  const std::uint64_t n_evictions = brain_.counters(model)[index.value].evictions;
  const bool is_started = brain_.promote(model, index, expert);
  const bool has_evicted = brain_.counters(model)[index.value].evictions != n_evictions;
  expect(brain_.coming(model) == n_coming + (is_started ? 1 : 0), ViolationKind::kWrongCount, "coming");
  // A gain of 0 may also be that of two experts of which nothing is known.
  expect(is_started || gain == 0, ViolationKind::kBadCommand, "a promotion with a gain found no room");
  expect(!has_evicted || (is_started && gain != std::numeric_limits<double>::infinity()),
         ViolationKind::kBadCommand, "a promotion evicted an expert without need");
  if (is_started) {
    expect(brain_.promotion_gain(model, index, expert) == 0, ViolationKind::kBadCommand,
           "an expert that is on its way is worth a promotion");
    // With batches the table lags behind the Brain.
    expect(!is_seen_resident || world_.options.command_batch > 1, ViolationKind::kBadCommand,
           "a resident expert was promoted");
  }
  ++(is_started ? world_.stats.promotions : world_.stats.promotions_refused);
  if (has_evicted) ++world_.stats.promotions_evicting;
  after_event();
}

void FakeShell::move_slot(ModelId model, LayerIndex from, LayerIndex to) {
  world_.trace.note("move slot", {model.value, from.value, to.value});
  ++(brain_.move_slot(model, from, to) ? world_.stats.trades : world_.stats.trades_refused);
  after_event();
}

void FakeShell::corrupt(ModelId model, LayerIndex index, SlotIndex slot) {
  FakeLayer& layer = world_.layer(model, index);
  const auto named = std::find(layer.table.begin(), layer.table.end(), static_cast<std::int32_t>(slot.value));
  if (named == layer.table.end()) return;
  const ExpertIndex expert(static_cast<std::uint32_t>(named - layer.table.begin()));
  world_.trace.note("corrupt", {model.value, index.value, slot.value, expert.value});
  const Brain::Reload reload = brain_.slot_corrupt(model, index, slot, expert);
  if (reload == Brain::Reload::kReading) {
    ++world_.stats.reloads;
    layer.slots[slot.value].is_stray = true;
  } else if (reload == Brain::Reload::kPinned) {
    ++world_.stats.reloads_pinned;
  } else {  // with batches the table lags behind the Brain
    expect(world_.options.command_batch > 1, ViolationKind::kBadCommand, "a resident expert was not found");
  }
  after_event();
}

void FakeShell::tell_open() {
  for (auto& [id, model] : world_.models) {
    if (model.is_removed) continue;
    for (std::uint32_t i = 0; i < model.layers.size(); ++i) {
      FakeLayer& layer = model.layers[i];
      layer.n_open = brain_.slots(id, LayerIndex(i));
      layer.n_open_fewest = std::min(layer.n_open_fewest, layer.n_open);
    }
  }
}

void FakeShell::release(const Command& command) {
  FakeModel& model = world_.models.at(command.model);
  FakeLayer& layer = model.layers[command.layer.value];
  const std::uint32_t slot = command.slot.value;
  expect_idle(command);
  expect(
      std::find(layer.table.begin(), layer.table.end(), static_cast<std::int32_t>(slot)) == layer.table.end(),
      ViolationKind::kBadCommand, "release of a slot that the table names");
  ++world_.stats.releases;
  layer.busy[slot] = 0;
  layer.slots[slot].is_torn = true;
  if (world_.options.keep_released || layer.backed[slot] == 0) return;
  layer.backed[slot] = 0;
  --model.n_backed[layer.shape.slot_class];
}

void FakeShell::advance_grace(std::size_t i) {
  if (i >= graces_.size()) return;
  Grace& grace = graces_[i];
  const bool is_skipped = world_.options.skip_grace ||
                          (grace.has_risen && world_.options.skip_grace_of_rise) ||
                          (grace.place.slot.value >= kDeviceSlot && world_.options.skip_grace_of_fall);
  if (!is_skipped) {
    if (!grace.has_looked) return look_at_lanes(grace);
    if (!is_over(grace)) return;
  }
  const Place place = grace.place;
  if (grace.has_risen) world_.layer(place.model, place.layer).busy_at(place.slot.value) = 0;
  graces_.erase(graces_.begin() + static_cast<std::ptrdiff_t>(i));
  world_.trace.note("grace done", {place.model.value, place.layer.value, place.slot.value});
  brain_.grace_done(place.model, place.layer, place.slot);
  if (world_.rng.permille(world_.options.duplicate_permille)) {
    ++world_.stats.duplicates;
    brain_.grace_done(place.model, place.layer, place.slot);
  }
  after_event();
}

void FakeShell::finish_read(std::size_t i) {
  const Read read = reads_[i];
  reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(i));
  const Place& place = read.place;
  FakeModel& model = world_.models.at(place.model);
  FakeLayer& layer = model.layers[place.layer.value];
  if (world_.options.lose_completions && world_.rng.below(4) == 0) return;

  layer.busy[place.slot.value] = 0;
  if (read.outcome == ReadOutcome::kOk) {
    const bool is_from_disk = read.spare < 0;
    layer.slots[place.slot.value] = {
        .is_torn = !is_from_disk && spares_[static_cast<std::size_t>(read.spare)].bytes.is_torn,
        .expert = is_from_disk ? read.expert : spares_[static_cast<std::size_t>(read.spare)].bytes.expert,
        .serial = ++read_serial_};
  } else {
    ++(read.outcome == ReadOutcome::kIoError ? world_.stats.read_errors : world_.stats.models_changed);
    if (read.spare >= 0) ++world_.stats.falls_failed;
    for (Lane& lane : lanes_) {
      if (!lane.is_pending || lane.client->model() != place.model || lane.pending_layer != place.layer)
        continue;
      if (std::find(lane.pending_ids.begin(), lane.pending_ids.end(), read.expert) == lane.pending_ids.end())
        continue;
      (read.outcome == ReadOutcome::kIoError ? lane.has_seen_io_error : lane.has_seen_change) = true;
    }
  }
  if (model.is_removed) ++world_.stats.late_completions;
  world_.trace.note("read done", {place.model.value, place.layer.value, place.slot.value,
                                  static_cast<std::uint64_t>(read.outcome)});
  brain_.read_done(place.model, place.layer, place.slot, read.outcome);
  // A second report is harmless only while the slot is not being read again, which a failure can set off at
  // once; the event has no field that could tell the two apart, so a shell must not do that.
  if (read.outcome == ReadOutcome::kOk && world_.rng.permille(world_.options.duplicate_permille)) {
    ++world_.stats.duplicates;
    brain_.read_done(place.model, place.layer, place.slot, ReadOutcome::kIoError);
  }
  after_event();
  reclaim_spares();
}

// --------------------------------------------------------------------------------------------------------
// commands

void FakeShell::after_event() {
  brain_.check_invariants();
  tell_open();
  ++n_events_untaken_;
  if (n_events_untaken_ >= world_.options.command_batch || world_.rng.below(3) == 0) carry_out_commands();
}

void FakeShell::carry_out_commands() {
  n_events_untaken_ = 0;
  for (const Command& command : brain_.take_commands()) {
    world_.trace.note(
        "command",
        {static_cast<std::uint64_t>(command.kind), static_cast<std::uint64_t>(command.status),
         command.model.value, command.layer.value, command.expert.value, command.slot.value,
         command.lane.value, command.seq, command.from.value, static_cast<std::uint64_t>(command.spare + 1)});
    const auto found = world_.models.find(command.model);
    expect(found != world_.models.end() && !found->second.is_removed, ViolationKind::kBadCommand,
           "a command for a model that is not there");
    switch (command.kind) {
      case CommandKind::kUnpublish:
        unpublish(command);
        break;
      case CommandKind::kRead:
        start_read(command);
        break;
      case CommandKind::kHasten:
        hasten(command);
        break;
      case CommandKind::kPublish:
        publish(command);
        break;
      case CommandKind::kGrant:
        grant(command);
        break;
      case CommandKind::kRelease:
        release(command);
        break;
      case CommandKind::kCopyUp:
        copy_up(command);
        break;
      case CommandKind::kCopyAside:
        copy_aside(command);
        break;
      case CommandKind::kMove:
        move(command);
        break;
      case CommandKind::kSpareFreed:
        free_spare(command);
        break;
    }
  }
}

void FakeShell::unpublish(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  expect(layer.table[command.expert.value] == static_cast<std::int32_t>(command.slot.value),
         ViolationKind::kBadCommand, "unpublish of an expert that is not in that slot");
  expect(layer.busy_at(command.slot.value) == 0, ViolationKind::kBadCommand,
         "unpublish of a slot that is busy");
  for (const Lane& lane : lanes_) {
    expect(lane.client == nullptr || lane.client->model() != command.model ||
               !lane.client->relies_on(command.layer, command.expert),
           ViolationKind::kUntruthfulGrant, "an expert was taken away under a granted lease");
  }
  layer.table[command.expert.value] = kAbsent;
  layer.busy_at(command.slot.value) = 1;
  if (command.slot.value < kDeviceSlot) {
    ++world_.stats.evictions;
  } else {
    Spare* spare = find_spare(command.model, command.layer, kNobody);
    expect(spare != nullptr, ViolationKind::kBadCommand, "an expert falls for nobody");
    spare->falling = static_cast<std::int32_t>(command.expert.value);
  }
  Grace grace;
  grace.place = {.model = command.model, .layer = command.layer, .slot = command.slot};
  grace.leaving = command.expert;
  graces_.push_back(std::move(grace));
}

void FakeShell::expect_idle(const Command& command) const {
  const auto same_slot = [&](const Place& place) {
    return place.model == command.model && place.layer == command.layer && place.slot == command.slot;
  };
  expect(std::none_of(graces_.begin(), graces_.end(),
                      [&](const Grace& grace) { return same_slot(grace.place); }),
         ViolationKind::kBadCommand, "a slot is reused within its grace period");
  expect(std::none_of(reads_.begin(), reads_.end(), [&](const Read& read) { return same_slot(read.place); }),
         ViolationKind::kBadCommand, "a slot is reused while a read goes there");
  expect(std::none_of(copies_.begin(), copies_.end(),
                      [&](const Copy& copy) {
                        return same_slot(copy.place) ||
                               (copy.place.model == command.model && copy.place.layer == command.layer &&
                                copy.from == static_cast<std::int32_t>(command.slot.value));
                      }),
         ViolationKind::kBadCommand, "a slot is reused while it is being copied");
}

void FakeShell::start_read(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  const std::int32_t slot = static_cast<std::int32_t>(command.slot.value);
  expect(std::find(layer.table.begin(), layer.table.end(), slot) == layer.table.end(),
         ViolationKind::kBadCommand, "read into a slot that the table names");
  expect(layer.table[command.expert.value] == kAbsent, ViolationKind::kBadCommand,
         "read of a resident expert");
  expect_idle(command);
  const Spare* const spare =
      find_spare(command.model, command.layer, static_cast<std::int32_t>(command.expert.value));
  expect(spare == (command.spare < 0 ? nullptr : &spares_.at(static_cast<std::size_t>(command.spare))),
         ViolationKind::kBadCommand,
         "an expert is read from disk while a spare slot has it, or the other way round");
  if (spare != nullptr) {
    expect(!spare->bytes.is_torn && spare->bytes.expert == command.expert, ViolationKind::kBadCommand,
           "the spare slot does not have the expert's bytes");
    world_.stats.falls_elsewhere += spare->rising_from != command.slot ? 1 : 0;
  }
  FakeModel& model = world_.models.at(command.model);
  const std::uint32_t slot_class = layer.shape.slot_class;
  if (layer.backed[command.slot.value] == 0) ++model.n_backed[slot_class];
  layer.backed[command.slot.value] = 1;
  expect(model.n_backed[slot_class] <= model.n_backed_max[slot_class], ViolationKind::kOverBudget,
         "more memory than slots");
  if (command.is_ahead) ++world_.stats.reads_ahead;
  layer.busy[command.slot.value] = 1;
  layer.slots[command.slot.value].is_torn = true;  // a disk writes in any order from now on
  ++world_.stats.reads;

  const SimOptions& options = world_.options;
  ReadOutcome outcome = ReadOutcome::kOk;
  if (!world_.is_winding_down) {
    if (world_.rng.permille(options.read_error_permille)) outcome = ReadOutcome::kIoError;
    if (world_.rng.permille(options.model_changed_permille)) outcome = ReadOutcome::kModelChanged;
  }
  reads_.push_back({.place = {.model = command.model, .layer = command.layer, .slot = command.slot},
                    .expert = command.expert,
                    .due = world_.now + world_.rng.below(options.read_delay_ticks_max + 1),
                    .outcome = outcome,
                    .is_ahead = command.is_ahead,
                    .spare = command.spare});
}

void FakeShell::hasten(const Command& command) {
  const auto read = std::find_if(reads_.begin(), reads_.end(), [&](const Read& each) {
    return each.place.model == command.model && each.place.layer == command.layer &&
           each.place.slot == command.slot;
  });
  // With batches the read may have ended before anybody was told to hurry.
  if (read == reads_.end() && world_.options.command_batch > 1) return;
  expect(read != reads_.end() && read->is_ahead && read->expert == command.expert, ViolationKind::kBadCommand,
         "hurry of a read that is not under way, or was not behind others");
  read->is_ahead = false;
  read->due = std::min(read->due, world_.now);
  ++world_.stats.reads_hastened;
}

void FakeShell::publish(const Command& command) {
  FakeLayer& layer = world_.layer(command.model, command.layer);
  expect(layer.table[command.expert.value] == kAbsent, ViolationKind::kBadCommand,
         "publish of a resident expert");
  expect(layer.busy_at(command.slot.value) == 0, ViolationKind::kUntruthfulPublish,
         "publish of a slot that is busy");
  expect(layer.holds(command.slot.value, command.expert), ViolationKind::kUntruthfulPublish,
         "publish of a slot without the expert's bytes");
  layer.table[command.expert.value] = static_cast<std::int32_t>(command.slot.value);
}

void FakeShell::grant(const Command& command) {
  Lane& lane = lanes_[command.lane.value];
  expect(lane.client != nullptr && lane.client->model() == command.model, ViolationKind::kBadCommand,
         "an answer for a lane that is closed");
  // Commands of several events may be taken together, so the answer of a lease that was replaced since can
  // come late.
  const bool is_newest = lane.is_pending && lane.pending_seq == command.seq;
  expect(is_newest || (world_.options.command_batch > 1 && lane.is_pending && command.seq < lane.pending_seq),
         ViolationKind::kBadCommand, "an answer that no lease waits for");
  lane.client->words.lease_done = command.seq;
  lane.client->words.lease_status = command.status;
  if (!is_newest) return;
  lane.is_pending = false;
  lane.stalled_since = 0;  // from here on it may begin
  lane.leased_layer = lane.pending_layer;
  const FakeLayer& layer = world_.layer(command.model, lane.pending_layer);
  switch (command.status) {
    case GrantStatus::kOk:
      for (ExpertIndex expert : lane.pending_ids) {
        expect(layer.table[expert.value] != kAbsent, ViolationKind::kUntruthfulGrant,
               "granted, but not resident");
      }
      break;
    case GrantStatus::kIoError:
      expect(lane.has_seen_io_error, ViolationKind::kUntruthfulGrant, "failed, but no read of it had");
      break;
    case GrantStatus::kModelChanged:
      expect(lane.has_seen_change, ViolationKind::kUntruthfulGrant, "changed, but no read of it said so");
      break;
    case GrantStatus::kRefused:
      expect(lane.pending_ids.size() > layer.n_open_fewest, ViolationKind::kUntruthfulGrant,
             "refused what would fit");
      break;
    case GrantStatus::kNoRoom:
      expect(lane.pending_ids.size() <= layer.shape.room() + layer.device_slots.size() &&
                 (layer.has_been_held || lane.pending_phase == Phase::kPrompt),
             ViolationKind::kUntruthfulGrant, "no room for decode, but nobody had stalled");
      break;
  }
}

void FakeShell::check_at_rest() {
  carry_out_commands();
  for (std::uint32_t i = 0; i < n_lanes(); ++i) {
    expect(!brain_.has_lease_until(LaneId(i), nullptr), ViolationKind::kStuck, "a lease outlived its epoch");
  }
  for (const auto& [id, model] : world_.models) {
    if (model.is_removed) continue;
    const auto counters = brain_.counters(id);
    for (std::uint32_t i = 0; i < model.layers.size(); ++i) {
      const FakeLayer& layer = model.layers[i];
      const auto n_absent = std::count(layer.table.begin(), layer.table.end(), kAbsent);
      const auto n_on_device = std::count_if(layer.table.begin(), layer.table.end(), [](std::int32_t slot) {
        return slot >= static_cast<std::int32_t>(kDeviceSlot);
      });
      expect(brain_.resident(id, LayerIndex(i)) ==
                 layer.shape.n_experts - static_cast<std::uint32_t>(n_absent + n_on_device),
             ViolationKind::kWrongCount, "resident");
      expect(brain_.device_resident(id, LayerIndex(i)) == static_cast<std::uint32_t>(n_on_device),
             ViolationKind::kWrongCount, "resident in device slots");
      expect(!brain_.is_rising(id, LayerIndex(i)) &&
                 std::none_of(spares_.begin(), spares_.end(),
                              [&](const Spare& spare) { return spare.is_lent && spare.model == id; }),
             ViolationKind::kStuck, "a move has not ended");
      for (std::uint32_t expert = 0; expert < layer.shape.n_experts; ++expert) {
        const auto slot = brain_.slot_of(id, LayerIndex(i), ExpertIndex(expert));
        expect((slot ? static_cast<std::int32_t>(slot->value) : kAbsent) == layer.table[expert],
               ViolationKind::kWrongCount, "slot");
      }
      world_.stats.device_hits += counters[i].device_hits;
      expect(counters[i].lookups == layer.expected.lookups, ViolationKind::kWrongCount, "lookups");
      expect(counters[i].leases == layer.expected.leases, ViolationKind::kWrongCount, "leases");
      world_.stats.leases_queued += counters[i].leases_queued;
      world_.stats.prefetch_used += counters[i].prefetch_used;
      world_.stats.prefetch_late += counters[i].prefetch_late;
      world_.stats.prefetch_wasted += counters[i].prefetch_wasted;
      world_.stats.prefetch_regretted += counters[i].prefetch_regretted;
      // With batches the table lags behind the Brain, so hits cannot be told from outside.
      if (world_.options.command_batch > 1) continue;
      expect(counters[i].hits == layer.expected.hits, ViolationKind::kWrongCount, "hits");
      expect(counters[i].device_hits == layer.expected.device_hits, ViolationKind::kWrongCount,
             "hits in device slots");
      expect(counters[i].misses == layer.expected.misses, ViolationKind::kWrongCount, "misses");
    }
  }
}

}  // namespace moecached::sim
