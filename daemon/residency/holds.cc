// What stalled lanes keep, and how the others get along beside it. A hold pins experts as a lease does, but
// nobody waits for its end: the slots count as missing from the layer, and a lease that would need them is
// told so (kNoRoom) instead of waiting for a process that may never go on.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/residency/brain_state.h"

namespace moecached {

void Brain::State::add_hold(LaneId id, LayerIndex layer_index, std::span<const ExpertIndex> experts,
                            std::uint64_t epoch) {
  LaneState& lane = open_lane(id);
  if (epoch <= lane.completed) return;
  LayerTable& table = layer_of(*lane.model, layer_index).table;
  // One per layer, with the newest epoch: an honest lane has ended the older one, and one that lies must not
  // make the list grow.
  auto hold = std::ranges::find(lane.holds, layer_index, &Hold::layer);
  if (hold != lane.holds.end()) hold->epoch = std::max(hold->epoch, epoch);
  for (ExpertIndex expert : experts) {
    if (!table.is_resident(expert)) continue;
    if (hold == lane.holds.end()) {
      lane.holds.push_back({.layer = layer_index, .epoch = epoch, .experts = {}});
      hold = lane.holds.end() - 1;
    }
    if (std::ranges::find(hold->experts, expert) != hold->experts.end()) continue;
    table.hold(expert);
    hold->experts.push_back(expert);
  }
}

void Brain::State::drop_holds(LaneId id, std::uint64_t completed) {
  LaneState& lane = lanes[id.value];
  for (std::size_t i = 0; i < lane.holds.size();) {
    if (lane.holds[i].epoch > completed) {
      ++i;
      continue;
    }
    const Hold hold = std::move(lane.holds[i]);
    lane.holds.erase(lane.holds.begin() + static_cast<std::ptrdiff_t>(i));
    LayerState& layer = layer_of(*lane.model, hold.layer);
    for (ExpertIndex expert : hold.experts) layer.table.release(expert);
    serve_queue(layer);
  }
}

void Brain::State::refuse_misfits(LayerState& layer) {
  for (std::uint32_t at = layer.queue.first(); at != LaneList::kNone;) {
    const LaneId id(at);
    at = LaneList::next(links, at);
    Lease& lease = lanes[id.value].lease;
    if (layer.table.fits_beside_held(lease.experts)) continue;
    layer.queue.remove(links, id);
    lease.state = LeaseState::kNone;
    send_grant(id, GrantStatus::kNoRoom);
  }
}

void Brain::hold(LaneId id, LayerIndex layer_index, std::span<const ExpertIndex> experts,
                 std::uint64_t epoch) {
  state_->add_hold(id, layer_index, experts, epoch);
  LayerState& layer = State::layer_of(*state_->open_lane(id).model, layer_index);
  state_->refuse_misfits(layer);
  state_->serve_queue(layer);
}

void Brain::hold_lease(LaneId id) {
  CHECK(blocks_others(id));
  LaneState& lane = state_->open_lane(id);
  hold(id, lane.lease.layer, lane.lease.experts, lane.lease.epoch);
}

bool Brain::State::undo(const Eviction& eviction, bool move_coming) {
  ModelState* model = find_model(eviction.model);
  if (model == nullptr) return false;
  LayerState& layer = layer_of(*model, eviction.layer);
  ExpertIndex coming;
  switch (layer.table.undo_eviction(eviction.slot, eviction.leaving, move_coming, &coming, commands)) {
    case LayerTable::Undo::kIgnored:
      return false;
    case LayerTable::Undo::kMoved:
      return true;
    case LayerTable::Undo::kNoRoom:
      queue_again(layer, coming);
      return true;
    case LayerTable::Undo::kKept:
      trade_undone(*model, layer);
      return true;
    case LayerTable::Undo::kPutBack:
      load_ended(layer, eviction.leaving, ReadOutcome::kOk);
      return true;
    case LayerTable::Undo::kDraining:
    case LayerTable::Undo::kStalledNoRoom:
      queue_again(layer, coming);
      [[fallthrough]];
    case LayerTable::Undo::kStalled:
      refuse_misfits(layer);
      serve_queue(layer);
      return false;
  }
  return false;
}

bool Brain::undo_eviction(const Eviction& eviction, LaneId lane, std::uint64_t epoch) {
  if (!state_->undo(eviction, true)) return false;
  hold(lane, eviction.layer, {&eviction.leaving, 1}, epoch);
  return true;
}

bool Brain::cancel_eviction(const Eviction& eviction) {
  if (!state_->undo(eviction, false)) return false;
  state_->serve_queue(State::layer_of(*state_->find_model(eviction.model), eviction.layer));
  return true;
}

bool Brain::has_lease_until(LaneId id, std::uint64_t* epoch) const {
  if (id.value >= state_->lanes.size()) return false;
  const LaneState& lane = state_->lanes[id.value];
  std::uint64_t first = UINT64_MAX;
  if (lane.lease.state == LeaseState::kGranted) first = lane.lease.epoch;
  for (const Hold& hold : lane.holds) first = std::min(first, hold.epoch);
  if (lane.lease.state != LeaseState::kGranted && lane.holds.empty()) return false;
  if (epoch != nullptr) *epoch = first;
  return true;
}

bool Brain::blocks_others(LaneId id) const {
  if (id.value >= state_->lanes.size()) return false;
  const LaneState& lane = state_->lanes[id.value];
  const Lease& lease = lane.lease;
  if (lease.state != LeaseState::kGranted || lease.experts.empty()) return false;
  if (State::layer_of(*lane.model, lease.layer).queue.empty()) return false;
  return std::ranges::none_of(lane.holds, [&](const Hold& hold) {
    return hold.layer == lease.layer && hold.epoch >= lease.epoch &&
           std::ranges::all_of(lease.experts, [&](ExpertIndex expert) {
             return std::ranges::find(hold.experts, expert) != hold.experts.end();
           });
  });
}

}  // namespace moecached
