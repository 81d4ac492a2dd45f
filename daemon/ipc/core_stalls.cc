// The core loop's watch over lanes that do not move (a stopped process): they must not hold up the others for
// as long as they like. Two things of theirs can: an epoch that a grace period waits for, and a granted lease
// whose slots others queue for. What such a lane may be using is kept for it; the others get what is left, or
// are told at once that nothing is (kNoRoom), and stream.
#include <atomic>

#include "daemon/ipc/core.h"
#include "daemon/platform/clock.h"

namespace moecached {

// Whether the lane, which others wait for, has neither begun nor ended an epoch for too long.
bool Core::has_stalled(Lane& lane, std::uint64_t now) {
  const std::uint64_t begun = std::atomic_ref(lane.words->begun).load(std::memory_order_relaxed);
  if (lane.stalled_since_ns == 0 || lane.stalled_begun != begun) {
    lane.stalled_since_ns = now;
    lane.stalled_begun = begun;
    return false;
  }
  return now - lane.stalled_since_ns > kStallAfterNs;
}

// What the lane may be using of the layer in the epoch in which it has stalled: what its record of the epoch
// names; anything, when it was stopped before it wrote the record or the record was dropped.
std::span<const ExpertIndex> Core::may_use(const Lane& lane, LayerIndex layer) {
  if (lane.use_epoch == lane.stalled_begun >> 16 && lane.use_layer == layer) return lane.use_ids;
  const std::uint32_t n_experts = lane.model->layout().layers[layer.value].n_experts;
  for (std::uint32_t i = static_cast<std::uint32_t>(all_experts_.size()); i < n_experts; ++i)
    all_experts_.emplace_back(i);
  return std::span(all_experts_).first(n_experts);
}

void Core::watch_stalls() {
  const std::uint64_t now = monotonic_ns();
  for (auto& [id, state] : sessions_) {
    for (const auto& lane : state.lanes) {
      if (lane && brain_.blocks_others(lane->id) && has_stalled(*lane, now)) brain_.hold_lease(lane->id);
    }
  }
  if (!grace_.empty()) {
    stalled_.clear();
    grace_.for_each_wait([&](std::uint64_t key, const GraceTicket& ticket) {
      Lane* lane = find_lane(key);
      // Opened, or opened for another model, since the loop last looked: then it has not stalled.
      if (lane == nullptr || lane->model->id() != ticket.model) return;
      if (has_stalled(*lane, now)) stalled_.emplace_back(key, ticket);
    });
    for (const auto& [key, ticket] : stalled_) {
      Lane& lane = *find_lane(key);
      const std::uint64_t epoch = lane.stalled_begun >> 16;
      // Before its expert goes back, so that the newcomer is not sent to a slot that the lane may be using
      // too.
      brain_.hold(lane.id, ticket.layer, may_use(lane, ticket.layer), epoch);
      const Eviction eviction{ticket.model, ticket.layer, ticket.slot, ticket.expert};
      if (brain_.undo_eviction(eviction, lane.id, epoch)) {
        grace_.forget(ticket);
        if (const auto model = find_model(ticket.model))
          tell_open(*model);  // a slot that was to move has stayed
      } else {                // undone for another lane already
        brain_.hold(lane.id, ticket.layer, {&ticket.expert, 1}, epoch);
      }
    }
  }
  carry_out_commands();
}

}  // namespace moecached
