// Who waits for what: a lease starts whole or queues holding nothing, and each layer serves its queue in
// order.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/residency/brain_state.h"

namespace moecached {

void Brain::State::send_grant(LaneId id, GrantStatus status) {
  const LaneState& lane = lanes[id.value];
  Command command;
  command.kind = CommandKind::kGrant;
  command.status = status;
  command.model = lane.model_id;
  command.lane = id;
  command.seq = lane.lease.seq;
  commands.push_back(command);
}

// Serves nobody itself: the caller does, once its own loops are done.
void Brain::State::grant(LaneId id) {
  LaneState& lane = lanes[id.value];
  lane.lease.state = LeaseState::kGranted;
  send_grant(id, GrantStatus::kOk);
  // A client may lie about its epoch. One that is over already would pin its experts for ever, as nothing
  // reports the end of an epoch twice.
  if (lane.lease.epoch <= lane.completed) {
    layer_of(*lane.model, lane.lease.layer).table.unpin(lane.lease.experts);
    lane.lease.state = LeaseState::kNone;
  }
}

void Brain::State::fail(LaneId id, LayerState& layer, GrantStatus status) {
  Lease& lease = lanes[id.value].lease;
  layer.loading.remove(links, id);
  layer.table.unpin(lease.experts);
  lease.state = LeaseState::kNone;
  send_grant(id, status);
}

void Brain::State::start(LaneId id, LayerState& layer) {
  Lease& lease = lanes[id.value].lease;
  lease.n_absent = layer.table.count_absent(lease.experts);
  layer.table.admit(lease.experts, lease.step, commands, lease.phase);
  if (lease.n_absent == 0) {
    grant(id);
  } else {
    lease.state = LeaseState::kLoading;
    layer.loading.push_back(links, id);
  }
}

void Brain::State::ask(LaneId id, std::span<const ExpertIndex> experts) {
  LaneState& lane = lanes[id.value];
  Lease& lease = lane.lease;
  CHECK(lease.state == LeaseState::kNone);
  LayerState& layer = layer_of(*lane.model, lease.layer);
  if (layer.table.count_in_ram(experts) > layer.table.n_slots()) {
    send_grant(id, GrantStatus::kRefused);
    return;
  }
  if (!layer.table.fits_beside_held(experts)) {
    send_grant(id, GrantStatus::kNoRoom);
    return;
  }
  lease.experts.assign(experts.begin(), experts.end());
  if (layer.queue.empty() && layer.table.can_admit(lease.experts, lease.phase)) {
    start(id, layer);
    return;
  }
  // A prompt can do without slots, so it neither waits for any nor keeps others waiting.
  if (lease.phase == Phase::kPrompt) {
    send_grant(id, GrantStatus::kNoRoom);
    return;
  }
  // Behind the others even when nothing is missing: who overtakes can do so for ever.
  ++lane.model->counters[lease.layer.value].leases_queued;
  lease.state = LeaseState::kQueued;
  layer.queue.push_back(links, id);
}

void Brain::State::serve_queue(LayerState& layer) {
  while (!layer.queue.empty()) {
    const LaneId id = layer.queue.front();
    Lease& lease = lanes[id.value].lease;
    const bool fits = layer.table.can_admit(lease.experts, lease.phase);
    if (!fits && lease.phase == Phase::kDecode) return;
    layer.queue.remove(links, id);
    if (fits) {
      start(id, layer);
    } else {  // a prompt that was here because it lost its slot: it neither waits nor keeps others waiting
      lease.state = LeaseState::kNone;
      send_grant(id, GrantStatus::kNoRoom);
    }
  }
}

void Brain::State::drop(LaneId id) {
  LaneState& lane = lanes[id.value];
  if (lane.lease.state == LeaseState::kNone) return;
  LayerState& layer = layer_of(*lane.model, lane.lease.layer);
  if (lane.lease.state == LeaseState::kQueued) {
    layer.queue.remove(links, id);
  } else {
    if (lane.lease.state == LeaseState::kLoading) layer.loading.remove(links, id);
    layer.table.unpin(lane.lease.experts);
  }
  lane.lease.state = LeaseState::kNone;
  serve_queue(layer);
}

void Brain::State::load_ended(LayerState& layer, ExpertIndex expert, ReadOutcome outcome) {
  for (std::uint32_t at = layer.loading.first(); at != LaneList::kNone;) {
    const LaneId id(at);
    at = LaneList::next(links, at);
    Lease& lease = lanes[id.value].lease;
    if (std::find(lease.experts.begin(), lease.experts.end(), expert) == lease.experts.end()) continue;
    if (outcome == ReadOutcome::kIoError) {
      fail(id, layer, GrantStatus::kIoError);
    } else if (outcome == ReadOutcome::kModelChanged) {
      fail(id, layer, GrantStatus::kModelChanged);
    } else if (--lease.n_absent == 0) {
      layer.loading.remove(links, id);
      grant(id);
    }
  }
  serve_queue(layer);
}

// Back to the head of the queue, in the order in which they left it. What else was started for them goes on.
void Brain::State::queue_again(LayerState& layer, ExpertIndex expert) {
  requeued.clear();
  for (std::uint32_t at = layer.loading.first(); at != LaneList::kNone; at = LaneList::next(links, at)) {
    const Lease& lease = lanes[at].lease;
    if (std::find(lease.experts.begin(), lease.experts.end(), expert) != lease.experts.end())
      requeued.emplace_back(at);
  }
  for (auto id = requeued.rbegin(); id != requeued.rend(); ++id) {
    Lease& lease = lanes[id->value].lease;
    layer.loading.remove(links, *id);
    layer.table.unpin(lease.experts);
    lease.state = LeaseState::kQueued;
    layer.queue.push_front(links, *id);
  }
}

}  // namespace moecached
