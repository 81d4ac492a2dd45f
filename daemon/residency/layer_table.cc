#include "daemon/residency/layer_table.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "daemon/base/check.h"

namespace moecached {

LayerTable::LayerTable(Place place, LayerShape shape, std::unique_ptr<EvictionPolicy> policy,
                       LayerCounters& counters)
    : place_(place),
      policy_(std::move(policy)),
      counters_(counters),
      history_(shape.n_experts, kHistoryDecay),
      own_history_(shape.n_experts, kHistoryDecay),
      slots_(shape.room()),
      experts_(shape.n_experts),
      n_open_(shape.n_slots) {
  const std::uint32_t n_max = shape.room();
  CHECK(shape.n_slots >= 1 && shape.n_slots <= n_max && n_max <= shape.n_experts);
  free_.reserve(n_max);
  closed_.reserve(n_max);
  for (std::uint32_t slot = n_max; slot > 0; --slot) {
    const bool is_open = slot <= shape.n_slots;
    (is_open ? free_ : closed_).push_back(SlotIndex(slot - 1));
    if (!is_open) slots_[slot - 1].state = SlotState::kClosed;
  }
  candidates_.reserve(n_max);
  prompt_candidates_.reserve(n_max);
  copies_.reserve(n_max);
  victims_.reserve(n_max);
}

std::uint32_t LayerTable::count_absent(std::span<const ExpertIndex> experts) const {
  return static_cast<std::uint32_t>(
      std::count_if(experts.begin(), experts.end(), [this](ExpertIndex e) { return !is_resident(e); }));
}

std::uint32_t LayerTable::count_in_ram(std::span<const ExpertIndex> experts) const {
  return static_cast<std::uint32_t>(
      std::count_if(experts.begin(), experts.end(), [this](ExpertIndex e) { return !is_on_device(at(e)); }));
}

std::uint32_t LayerTable::count_ram_slots(std::span<const ExpertIndex> experts) const {
  const auto any = [experts](const auto& is_it) { return std::ranges::any_of(experts, is_it); };
  const bool has_both = any([this](ExpertIndex expert) { return device_.pins(expert); }) &&
                        any([this](ExpertIndex expert) { return device_.is_falling(expert); });
  return count_in_ram(experts) - (has_both ? 1 : 0);
}

Step LayerTable::touch(std::span<const ExpertIndex> experts, Phase phase) {
  const std::uint64_t misses = count_absent(experts);
  counters_.lookups += experts.size();
  counters_.hits += experts.size() - misses;
  counters_.misses += misses;
  counters_.device_hits += experts.size() - count_in_ram(experts);
  if (phase == Phase::kPrompt) return step_;
  return use(experts, true);
}

Step LayerTable::use(std::span<const ExpertIndex> experts, bool is_own) {
  const Step step = ++step_;
  own_share_ = kShareDecay * own_share_ + (is_own ? 1 - kShareDecay : 0);
  for (ExpertIndex index : experts) {
    Expert& expert = at(index);
    history_.use(index, step);
    if (is_own) own_history_.use(index, step);
    used_by_decode(expert, step);
    // That of one that falls as well: RAM's policy is told of its coming as of this step.
    if (expert.state == ExpertState::kResident || device_.move().falling == index) expert.last_step = step;
    if (is_on_device(expert)) {
      // A use that RAM does not serve and need not: to its policy it is neither a hit nor a miss.
      device_.policy().on_access(index, step);
      continue;
    }
    if (device_.n_slots() > 0) device_.policy().on_miss(index, step);
    if (expert.state == ExpertState::kResident) {
      policy_->on_access(index, step);
    } else {
      policy_->on_miss(index, step);
    }
  }
  return step;
}

void LayerTable::observe(std::span<const ExpertIndex> experts) { (void)use(experts, false); }

void LayerTable::set_peers(std::vector<const LayerTable*> peers, double cost) {
  for (const LayerTable* peer : peers) CHECK(peer->n_experts() == n_experts());
  peers_ = std::move(peers);
  peer_cost_ = cost;
}

bool LayerTable::is_elsewhere(ExpertIndex expert) const {
  return std::ranges::any_of(peers_, [expert](const LayerTable* peer) { return !peer->is_absent(expert); });
}

void LayerTable::used_by_decode(Expert& expert, Step step) {
  expert.is_prompts = false;
  if (expert.is_ahead) {
    expert.is_ahead = false;
    ++(expert.state == ExpertState::kResident ? counters_.prefetch_used : counters_.prefetch_late);
    if (expert.state == ExpertState::kComing) at(expert.slot).step = step;
  }
  if (expert.displaced_by == kNobody) return;
  // For one that was used it would have gone all the same.
  counters_.prefetch_regretted += at(expert.displaced_by).is_ahead ? 1 : 0;
  expert.displaced_by = kNobody;
}

void LayerTable::lose_prefetch(Expert& expert) {
  counters_.prefetch_wasted += expert.is_ahead ? 1 : 0;
  expert.is_ahead = false;
}

bool LayerTable::can_admit(std::span<const ExpertIndex> experts, Phase phase) const {
  const auto may_go = [&](const Expert& expert) {
    return is_in_ram(expert) && expert.pins == 0 && (phase == Phase::kDecode || !is_decodes(expert));
  };
  std::size_t n_wanted_slots = 0;
  std::size_t n_kept = 0;  // may go, but are part of the set itself
  for (ExpertIndex index : experts) {
    const Expert& expert = at(index);
    if (expert.state == ExpertState::kAbsent) ++n_wanted_slots;
    if (may_go(expert)) ++n_kept;
  }
  std::size_t n_may_go = n_evictable_;
  if (phase == Phase::kPrompt) {
    n_may_go = static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
      return slot.state == SlotState::kResident && may_go(at(slot.expert));
    }));
  }
  return n_wanted_slots <= free_.size() + n_may_go - n_kept;
}

void LayerTable::choose_victims(std::size_t n, ExpertIndex spared, Phase phase) {
  candidates_.clear();
  prompt_candidates_.clear();
  next_victim_ = 0;
  for (const Slot& slot : slots_) {
    if (slot.state != SlotState::kResident || slot.expert == spared) continue;
    const Expert& expert = at(slot.expert);
    if (expert.pins != 0) continue;
    if (expert.is_prompts) {
      prompt_candidates_.push_back(slot.expert);
    } else if (phase == Phase::kDecode || !is_decodes(expert)) {
      candidates_.push_back(slot.expert);
    }
  }
  victims_.resize(n);
  std::size_t n_chosen = 0;
  if (!prompt_candidates_.empty()) n_chosen = policy_->rank(prompt_candidates_, victims_);
  if (n_chosen < n) n_chosen += policy_->rank(candidates_, std::span(victims_).subspan(n_chosen));
  CHECK(n_chosen == n);
}

double LayerTable::choose_beside_peers(ExpertIndex newcomer) {
  candidates_.clear();
  prompt_candidates_.clear();
  copies_.clear();
  next_victim_ = 0;
  for (const Slot& slot : slots_) {
    if (slot.state != SlotState::kResident || at(slot.expert).pins != 0) continue;
    (at(slot.expert).is_prompts  ? prompt_candidates_
     : is_elsewhere(slot.expert) ? copies_
                                 : candidates_)
        .push_back(slot.expert);
  }
  const auto best_of = [this](std::span<const ExpertIndex> candidates) {
    ExpertIndex best = kNobody;
    if (!candidates.empty()) CHECK(policy_->rank(candidates, {&best, 1}) == 1);
    return best;
  };
  ExpertIndex victim = best_of(prompt_candidates_);
  if (victim == kNobody) {
    // Among equals the policy chooses. Between one that would be read from a peer then and one that would be
    // read from RAM the rates of use decide, which are the same for every policy.
    const ExpertIndex copy = best_of(copies_);
    victim = best_of(candidates_);
    if (copy != kNobody && (victim == kNobody || value(copy) <= value(victim))) victim = copy;
  }
  victims_.assign(1, victim);
  if (!is_elsewhere(newcomer) && !is_elsewhere(victim)) return policy_->gain(newcomer, victim);
  return value(newcomer) - value(victim);
}

void LayerTable::admit(std::span<const ExpertIndex> experts, Step step, std::vector<Command>& commands,
                       Phase phase) {
  std::size_t n_wanted_slots = 0;
  for (ExpertIndex index : experts) {
    Expert& expert = at(index);
    if (is_in_ram(expert) && expert.pins == 0) --n_evictable_;
    if (expert.state == ExpertState::kAbsent) {
      CHECK(expert.pins == 0);  // else the set names it twice
      ++n_wanted_slots;
    }
    if (expert.pins++ == 0 && expert.state == ExpertState::kComing && !device_.is_falling(index) &&
        at(expert.slot).is_ahead) {
      at(expert.slot).is_ahead = false;
      commands.push_back(make_command(CommandKind::kHasten, index, expert.slot));
    }
  }
  // Ranked once for the whole set: its experts count as simultaneous, so no victim may depend on another's
  // insertion.
  victims_.clear();
  if (n_wanted_slots > free_.size()) {
    if (!peers_.empty() && experts.size() == 1 && phase == Phase::kDecode) {
      (void)choose_beside_peers(experts.front());
    } else {
      choose_victims(n_wanted_slots - free_.size(), kNobody, phase);
    }
  }
  for (ExpertIndex index : experts) {
    if (at(index).state != ExpertState::kAbsent) continue;
    at(index).is_prompts = phase == Phase::kPrompt;
    place(index, step, commands);
  }
}

void LayerTable::place(ExpertIndex index, Step step, std::vector<Command>& commands) {
  Expert& expert = at(index);
  if (!free_.empty()) {
    expert.slot = free_.back();
    free_.pop_back();
    command_read(index, expert.slot, commands);
  } else {
    expert.slot = evict(SlotState::kEvicting, index, commands);
  }
  expert.state = ExpertState::kComing;
  expert.displaced_by = kNobody;
  at(expert.slot).expert = index;
  at(expert.slot).step = step;
}

SlotIndex LayerTable::evict(SlotState to, ExpertIndex coming, std::vector<Command>& commands) {
  const ExpertIndex index = victims_[next_victim_++];
  Expert& victim = at(index);
  CHECK(victim.state == ExpertState::kResident && victim.pins == 0);
  policy_->on_remove(index);
  victim.state = ExpertState::kAbsent;
  victim.displaced_by = coming != kNobody && at(coming).is_ahead ? coming : kNobody;
  lose_prefetch(victim);
  --n_resident_;
  --n_evictable_;
  ++counters_.evictions;
  at(victim.slot).state = to;
  at(victim.slot).is_ahead = false;
  commands.push_back(make_command(CommandKind::kUnpublish, index, victim.slot));
  return victim.slot;
}

void LayerTable::add_open(std::int32_t n) {
  n_open_ += static_cast<std::uint32_t>(n);
  policy_->set_slots(n_open_);
}

void LayerTable::open_slots(std::uint32_t n) {
  CHECK(n <= closed_.size());
  for (std::uint32_t i = 0; i < n; ++i) {
    at(closed_.back()).state = SlotState::kFree;
    free_.push_back(closed_.back());
    closed_.pop_back();
  }
  // The lowest first, as at the beginning: a layer that gets a slot for every expert is filled in order.
  std::ranges::sort(free_, std::greater<>(), &SlotIndex::value);
  add_open(static_cast<std::int32_t>(n));
}

LayerTable::Close LayerTable::close_slot(std::vector<Command>& commands) {
  if (n_open_ <= 1 || (free_.empty() && n_evictable_ == 0)) return Close::kNoRoom;
  if (!free_.empty()) {
    const SlotIndex index = free_.back();
    free_.pop_back();
    at(index).state = SlotState::kClosed;
    closed_.push_back(index);
    add_open(-1);
    commands.push_back(make_command(CommandKind::kRelease, kNobody, index));
    return Close::kClosed;
  }
  choose_victims(1, kNobody, Phase::kDecode);
  (void)evict(SlotState::kClosing, kNobody, commands);
  ++n_closing_;
  add_open(-1);
  return Close::kClosing;
}

void LayerTable::command_read(ExpertIndex expert, SlotIndex slot, std::vector<Command>& commands) {
  at(slot).state = SlotState::kLoading;
  at(slot).is_ahead = at(expert).is_ahead && at(expert).pins == 0;
  Command command = make_command(CommandKind::kRead, expert, slot);
  command.is_ahead = at(slot).is_ahead;
  if (device_.is_landing(expert)) command.spare = device_.move().spare;
  commands.push_back(command);
}

bool LayerTable::prefetch(ExpertIndex index, std::span<const float> likelihood,
                          std::vector<Command>& commands) {
  Expert& expert = at(index);
  if (expert.state != ExpertState::kAbsent) return false;
  if (free_.empty()) {
    candidates_.clear();
    next_victim_ = 0;
    for (const Slot& slot : slots_) {
      if (slot.state != SlotState::kResident || at(slot.expert).pins != 0) continue;
      // Nor one that was fetched for the same step: two predictions would chase each other.
      if (at(slot.expert).is_ahead && slot.step == step_) continue;
      if (likelihood[slot.expert.value] * 2 <= likelihood[index.value]) candidates_.push_back(slot.expert);
    }
    victims_.resize(1);
    if (policy_->rank(candidates_, victims_) == 0) return false;
  }
  expert.is_ahead = true;
  expert.is_prompts = false;
  ++counters_.prefetched;
  place(index, step_, commands);
  return true;
}

double LayerTable::promotion_gain(ExpertIndex index, Phase phase) {
  if (at(index).state != ExpertState::kAbsent) return 0;
  if (!free_.empty()) {
    if (!is_elsewhere(index)) return std::numeric_limits<double>::infinity();
    return phase == Phase::kPrompt ? 0 : value(index) * steps_per_own();
  }
  if (n_evictable_ == 0 || phase == Phase::kPrompt) return 0;
  if (!peers_.empty()) return choose_beside_peers(index) * (is_elsewhere(index) ? steps_per_own() : 1);
  choose_victims(1, kNobody, phase);
  return policy_->gain(index, victims_.front());
}

bool LayerTable::promote(ExpertIndex index, std::vector<Command>& commands, Phase phase) {
  const std::span one(&index, 1);
  if (at(index).state != ExpertState::kAbsent || !can_admit(one, phase)) return false;
  admit(one, step_, commands, phase);
  unpin(one);
  return true;
}

bool LayerTable::reload(SlotIndex index, ExpertIndex expert_index, std::vector<Command>& commands) {
  CHECK(is_in(index, expert_index));
  Expert& expert = at(expert_index);
  if (expert.pins != 0) return false;
  const Step last_step = expert.last_step;
  victims_.assign(1, expert_index);
  next_victim_ = 0;
  (void)evict(SlotState::kEvicting, kNobody, commands);
  expert.state = ExpertState::kComing;
  at(index).step = last_step;
  return true;
}

LayerTable::Undo LayerTable::undo_eviction(SlotIndex index, ExpertIndex old_index, bool move_coming,
                                           ExpertIndex* coming, std::vector<Command>& commands) {
  if (index.value >= kDeviceSlot) {
    const DeviceSlots::Move& move = device_.move();
    if (move.stage != DeviceSlots::Stage::kEmptying || move.slot != index) return Undo::kIgnored;
    put_back(commands);
    return Undo::kPutBack;
  }
  Slot& slot = at(index);
  if (slot.state == SlotState::kLeaving) {
    *coming = slot.expert;
    return keep_for_stalled(index, commands) ? Undo::kStalled : Undo::kStalledNoRoom;
  }
  Expert& old = at(old_index);
  const bool was_closing = slot.state == SlotState::kClosing;
  if (slot.state == SlotState::kEvicting && slot.expert == old_index) {
    // A policy is never told of 0 slots: in a layer of one the lane is waited for.
    if (!move_coming || n_open_ == 1) return Undo::kIgnored;
    *coming = old_index;
    old.state = ExpertState::kAbsent;
    slot.state = SlotState::kDraining;
    ++n_draining_;
    add_open(-1);
    return Undo::kDraining;
  }
  if ((slot.state != SlotState::kEvicting && !was_closing) || old.state != ExpertState::kAbsent)
    return Undo::kIgnored;
  const Step step = slot.step;
  Phase phase = Phase::kDecode;
  if (!was_closing) {
    *coming = slot.expert;
    if (at(*coming).is_prompts) phase = Phase::kPrompt;
    at(*coming).state = ExpertState::kAbsent;
    // A prefetch that nobody waits for is not worth another victim.
    if (at(*coming).pins == 0 && at(*coming).is_ahead) move_coming = false;
  }
  slot.state = SlotState::kResident;
  slot.expert = old_index;
  old.state = ExpertState::kResident;
  old.displaced_by = kNobody;
  old.slot = index;
  old.inserted_step = old.last_step = step_;  // a lane uses it right now
  ++n_resident_;
  ++n_evictable_;
  --counters_.evictions;
  if (was_closing) {
    --n_closing_;
    add_open(1);
  }
  policy_->on_insert(old_index, step_);
  commands.push_back(make_command(CommandKind::kPublish, old_index, index));
  if (was_closing) return Undo::kKept;
  bool has_room = move_coming;
  if (has_room && free_.empty()) {
    // The old expert itself must not be the only one that may go.
    const ExpertIndex both[] = {*coming, old_index};
    has_room = n_evictable_ >= 2 && can_admit(both, phase);
    if (has_room) choose_victims(1, old_index, phase);
  }
  if (!has_room) {
    lose_prefetch(at(*coming));
    if (device_.is_landing(*coming)) give_up_falling(commands);
    return Undo::kNoRoom;
  }
  place(*coming, step, commands);
  return Undo::kMoved;
}

void LayerTable::unpin(std::span<const ExpertIndex> experts) {
  for (ExpertIndex index : experts) {
    Expert& expert = at(index);
    CHECK(expert.pins > 0);
    --expert.pins;
    if (is_in_ram(expert) && expert.pins == 0) ++n_evictable_;
  }
}

void LayerTable::hold(ExpertIndex index) {
  Expert& expert = at(index);
  CHECK(expert.state == ExpertState::kResident);
  const bool is_slot_missing = is_in_ram(expert);
  if (expert.pins++ == 0 && is_slot_missing) --n_evictable_;
  if (expert.holds++ == 0 && is_slot_missing) ++n_held_;
}

void LayerTable::release(ExpertIndex index) {
  CHECK(at(index).holds > 0);
  if (--at(index).holds == 0 && is_in_ram(at(index))) --n_held_;
  unpin({&index, 1});
}

bool LayerTable::fits_beside_held(std::span<const ExpertIndex> experts, std::uint32_t n_fewer) const {
  const auto n_others = std::ranges::count_if(
      experts, [this](ExpertIndex expert) { return at(expert).holds == 0 && !is_on_device(at(expert)); });
  return n_held_ + n_stalled_ + static_cast<std::size_t>(n_others) + n_fewer <= n_open_;
}

LayerTable::Grace LayerTable::grace_done(SlotIndex index, std::vector<Command>& commands) {
  if (index.value >= kDeviceSlot) {
    device_grace_done(index, commands);
    return Grace::kNothing;
  }
  Slot& slot = at(index);
  switch (slot.state) {
    case SlotState::kClosing:
      slot.state = SlotState::kClosed;
      closed_.push_back(index);
      --n_closing_;
      commands.push_back(make_command(CommandKind::kRelease, kNobody, index));
      return Grace::kClosed;
    case SlotState::kEvicting:
      // Read even when no lease waits for the expert any more: the victim is gone already, and it was asked
      // for.
      command_read(slot.expert, index, commands);
      return Grace::kNothing;
    case SlotState::kDraining:
      slot.state = SlotState::kFree;
      free_.push_back(index);
      --n_draining_;
      add_open(1);
      return Grace::kFreed;
    case SlotState::kLeaving:
    case SlotState::kStalled:
      return vacated(index, commands);
    case SlotState::kFree:
    case SlotState::kLoading:
    case SlotState::kResident:
    case SlotState::kClosed:
      return Grace::kNothing;
  }
  return Grace::kNothing;
}

std::optional<ExpertIndex> LayerTable::read_done(SlotIndex index, ReadOutcome outcome,
                                                 std::vector<Command>& commands) {
  Slot& slot = at(index);
  if (slot.state != SlotState::kLoading) return std::nullopt;
  Expert& expert = at(slot.expert);
  const bool has_fallen = device_.is_landing(slot.expert);
  if (outcome != ReadOutcome::kOk) {
    ++counters_.read_failures;
    slot.state = SlotState::kFree;
    expert.state = ExpertState::kAbsent;
    lose_prefetch(expert);
    free_.push_back(index);
    if (has_fallen) give_up_falling(commands);
    return slot.expert;
  }
  slot.state = SlotState::kResident;
  expert.state = ExpertState::kResident;
  // One that has fallen is no newer than its last use.
  if (!has_fallen) expert.last_step = slot.step;
  expert.inserted_step = expert.last_step;
  ++n_resident_;
  if (expert.pins == 0) ++n_evictable_;
  if (!has_fallen) ++counters_.insertions;
  policy_->on_insert(slot.expert, expert.inserted_step);
  commands.push_back(make_command(CommandKind::kPublish, slot.expert, index));
  if (has_fallen) end_move(commands);
  return slot.expert;
}

void LayerTable::set_costs(const PolicyCosts& costs) {
  costs_ = costs;
  has_costs_ = true;
  policy_->set_costs(costs);
  if (device_.n_slots() > 0) device_.policy().set_costs(costs);
}

void LayerTable::seed_history(std::span<const double> uses_per_step) {
  std::vector<PastUse> past(experts_.size());
  for (std::uint32_t i = 0; i < experts_.size(); ++i) {
    const ExpertIndex index(i);
    const double given = i < uses_per_step.size() ? uses_per_step[i] : 0;
    past[i] = {.uses_per_step = std::max(history_.rate(index), given),
               .last_step = history_.last_step(index)};
  }
  history_.seed(past, step_);
}

std::vector<double> LayerTable::use_rates() const {
  std::vector<double> rates;
  for (std::uint32_t i = 0; i < experts_.size(); ++i) rates.push_back(history_.rate(ExpertIndex(i)));
  return rates;
}

void LayerTable::tell_past(EvictionPolicy& policy, Tier tier) const {
  if (has_costs_) policy.set_costs(costs_);
  std::vector<PastUse> past(experts_.size());
  enum class Kind : std::uint8_t { kMiss, kInsert, kAccess };
  struct Event {
    Step step;
    Kind kind;
    ExpertIndex expert;
  };
  std::vector<Event> events;
  events.reserve(experts_.size() * 2);
  for (std::uint32_t i = 0; i < experts_.size(); ++i) {
    const ExpertIndex index(i);
    const Expert& expert = experts_[i];
    past[i] = {.uses_per_step = history_.rate(index), .last_step = history_.last_step(index)};
    if (tier == Tier::kRam ? is_in_ram(expert) : is_on_device(expert)) {
      events.push_back({expert.inserted_step, Kind::kInsert, index});
      if (expert.last_step > expert.inserted_step) events.push_back({expert.last_step, Kind::kAccess, index});
    } else if (past[i].last_step > 0 && !is_on_device(expert)) {
      events.push_back({past[i].last_step, Kind::kMiss, index});
    }
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tie(a.step, a.kind, a.expert) < std::tie(b.step, b.kind, b.expert);
  });
  policy.seed(past, step_);
  for (const Event& event : events) {
    switch (event.kind) {
      case Kind::kMiss:
        policy.on_miss(event.expert, event.step);
        break;
      case Kind::kInsert:
        policy.on_insert(event.expert, event.step);
        break;
      case Kind::kAccess:
        policy.on_access(event.expert, event.step);
        break;
    }
  }
}

void LayerTable::replace_policy(std::unique_ptr<EvictionPolicy> policy) {
  tell_past(*policy, Tier::kRam);
  policy_ = std::move(policy);
}

void LayerTable::check(const Pins& expected) const {
  CHECK(expected.all.size() == experts_.size() && expected.held.size() == experts_.size());
  std::vector<std::uint32_t> names_of_slot(slots_.size());
  std::vector<std::pair<ExpertIndex, SlotIndex>> on_device;
  std::uint32_t n_resident = 0, n_evictable = 0, n_coming = 0, n_held = 0, n_closing = 0, n_draining = 0,
                n_ahead = 0;
  for (std::uint32_t i = 0; i < experts_.size(); ++i) {
    const Expert& expert = experts_[i];
    CHECK(expert.pins == expected.all[i] + (device_.pins(ExpertIndex(i)) ? 1 : 0));
    CHECK(expert.holds == expected.held[i]);
    CHECK(expert.holds == 0 || expert.state == ExpertState::kResident);
    if (expert.holds > 0 && is_in_ram(expert)) ++n_held;
    if (expert.is_ahead) ++n_ahead;
    CHECK(!expert.is_ahead || expert.state != ExpertState::kAbsent);
    CHECK(expert.displaced_by == kNobody || expert.state == ExpertState::kAbsent);
    if (expert.state == ExpertState::kAbsent) {
      CHECK(expert.pins == 0);
      continue;
    }
    if (is_on_device(expert)) {
      CHECK(expert.inserted_step <= expert.last_step && expert.last_step <= step_ && !expert.is_ahead);
      on_device.emplace_back(i, expert.slot);
      continue;
    }
    if (device_.is_falling(ExpertIndex(i))) {
      CHECK(expert.state == ExpertState::kComing && expert.slot == device_.move().slot);
      continue;
    }
    CHECK(expert.slot.value < slots_.size());
    const Slot& slot = slots_[expert.slot.value];
    ++names_of_slot[expert.slot.value];
    CHECK(slot.expert == ExpertIndex(i));
    if (expert.state == ExpertState::kResident) {
      CHECK(slot.state == SlotState::kResident);
      CHECK(expert.inserted_step <= expert.last_step && expert.last_step <= step_);
      ++n_resident;
      if (expert.pins == 0) ++n_evictable;
    } else {
      CHECK(slot.state == SlotState::kLoading || slot.state == SlotState::kEvicting ||
            slot.state == SlotState::kLeaving);
      ++n_coming;
    }
  }
  for (SlotIndex slot : free_) {
    CHECK(slot.value < slots_.size() && slots_[slot.value].state == SlotState::kFree);
    ++names_of_slot[slot.value];
  }
  for (SlotIndex slot : closed_) {
    CHECK(slot.value < slots_.size() && slots_[slot.value].state == SlotState::kClosed);
    ++names_of_slot[slot.value];
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state != SlotState::kClosing && slots_[i].state != SlotState::kDraining) continue;
    ++names_of_slot[i];
    ++(slots_[i].state == SlotState::kClosing ? n_closing : n_draining);
  }
  // What a move holds.
  const DeviceSlots::Move& move = device_.move();
  std::uint32_t n_stalled = 0;
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == SlotState::kStalled) {
      ++names_of_slot[i];
      ++n_stalled;
    }
    const bool is_leaving = move.stage == DeviceSlots::Stage::kLeaving && move.from == SlotIndex(i);
    CHECK((slots_[i].state == SlotState::kLeaving) == is_leaving);
    if (is_leaving && !move.falling) ++names_of_slot[i];
  }
  if (device_.is_moving() && move.stage < DeviceSlots::Stage::kLeaving) {
    CHECK(is_in_ram(at(move.rising)) && at(move.rising).slot == move.from);
    CHECK(!move.falling || device_.is_falling(*move.falling));
  }
  if (move.falling) CHECK(at(*move.falling).state == ExpertState::kComing);
  device_.check(on_device);
  for (std::uint32_t names : names_of_slot)
    // One owner: an expert, a list, its closing or draining, a move, or the lane it is kept for.
    CHECK(names == 1);
  CHECK(n_resident == n_resident_ && n_evictable == n_evictable_ && n_held == n_held_);
  CHECK(n_open_ >= 1 && n_closing == n_closing_ && n_draining == n_draining_);
  CHECK(n_stalled == n_stalled_ && n_coming == this->n_coming());
  CHECK(free_.size() + n_resident + n_coming + n_vacant() == n_open_);
  CHECK(n_open_ + n_closing + n_draining + closed_.size() == slots_.size());
  CHECK(counters_.hits + counters_.misses == counters_.lookups);
  CHECK(counters_.device_hits <= counters_.hits && counters_.swaps <= counters_.rises);
  CHECK(counters_.insertions - counters_.evictions ==
        n_resident_ + device_.n_resident() + (move.falling ? 1 : 0));
  CHECK(counters_.leases_queued <= counters_.leases);
  CHECK(counters_.prefetched ==
        counters_.prefetch_used + counters_.prefetch_late + counters_.prefetch_wasted + n_ahead);
}

}  // namespace moecached
