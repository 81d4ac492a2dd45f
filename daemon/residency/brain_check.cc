// The books as a whole, for tests and the simulator. Thread: core loop. Memory: allocates; never called by
// the daemon's event path.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/residency/brain_state.h"

namespace moecached {
namespace {

// Counts the lanes of a list and checks that each is in it by its own account; a cycle ends in a failed
// CHECK.
struct ListCheck {
  const std::vector<LaneState>& lanes;
  const std::vector<LaneLink>& links;

  [[nodiscard]] std::size_t walk(const LaneList& list, const ModelState* model, LayerIndex layer,
                                 LeaseState state) const {
    std::size_t n = 0;
    std::uint32_t before = LaneList::kNone;
    for (std::uint32_t at = list.first(); at != LaneList::kNone; at = LaneList::next(links, at)) {
      CHECK(at < lanes.size() && ++n <= lanes.size());
      const LaneState& lane = lanes[at];
      CHECK(lane.is_open && lane.model == model);
      CHECK(lane.lease.state == state && lane.lease.layer == layer);
      CHECK(links[at].prev == before);
      before = at;
    }
    return n;
  }
};

}  // namespace

void Brain::check_invariants() const {
  const State& state = *state_;
  CHECK(state.lanes.size() == state.links.size());
  std::size_t n_listed = 0;
  std::size_t n_open_lanes = 0;
  for (const auto& [id, model] : state.models) {
    CHECK(model->layers.size() == model->counters.size());
    CHECK(std::count(model->marks.begin(), model->marks.end(), 0) == static_cast<long>(model->marks.size()));
    const auto n_open = std::count_if(state.lanes.begin(), state.lanes.end(),
                                      [&](const LaneState& lane) { return lane.model == model.get(); });
    CHECK(static_cast<std::uint32_t>(n_open) == model->n_open_lanes);
    n_open_lanes += model->n_open_lanes;
    std::vector<std::uint32_t> n_promised(model->layers.size());

    for (std::uint32_t i = 0; i < model->layers.size(); ++i) {
      const LayerState& layer = model->layers[i];
      CHECK(layer.table.n_closing() <= 1);
      CHECK(State::n_taken(layer) <= layer.table.n_slots_max());
      if (layer.table.n_closing() > 0) ++n_promised[layer.closing_for.value];
      LayerTable::Pins pins;
      pins.all.resize(layer.table.n_experts());
      pins.held.resize(layer.table.n_experts());
      for (const LaneState& lane : state.lanes) {
        if (lane.model == model.get()) {
          for (const Hold& hold : lane.holds) {
            if (hold.layer != LayerIndex(i)) continue;
            CHECK(hold.epoch > lane.completed && !hold.experts.empty());
            for (ExpertIndex expert : hold.experts) {
              ++pins.all[expert.value];
              ++pins.held[expert.value];
            }
          }
        }
        const Lease& lease = lane.lease;
        if (lane.model != model.get() || lease.layer != LayerIndex(i)) continue;
        if (lease.state != LeaseState::kLoading && lease.state != LeaseState::kGranted) continue;
        for (ExpertIndex expert : lease.experts) ++pins.all[expert.value];
        const std::uint32_t n_absent = layer.table.count_absent(lease.experts);
        if (lease.state == LeaseState::kGranted) {
          CHECK(n_absent == 0);
          CHECK(lease.epoch > lane.completed);
        } else {
          CHECK(n_absent == lease.n_absent && n_absent > 0);
        }
      }
      layer.table.check(pins);

      const ListCheck lists{state.lanes, state.links};
      n_listed += lists.walk(layer.queue, model.get(), LayerIndex(i), LeaseState::kQueued);
      n_listed += lists.walk(layer.loading, model.get(), LayerIndex(i), LeaseState::kLoading);
      // No lost wake-up: whoever heads the queue really has to wait.
      if (!layer.queue.empty()) {
        CHECK(!layer.table.can_admit(state.lanes[layer.queue.front().value].lease.experts));
      }
      // Nor does anybody wait for a stalled lane.
      for (std::uint32_t at = layer.queue.first(); at != LaneList::kNone;
           at = LaneList::next(state.links, at)) {
        CHECK(layer.table.fits_beside_held(state.lanes[at].lease.experts));
      }
      // Nor would anybody that is sent back to the queue wait for slots that are gone.
      for (std::uint32_t at = layer.loading.first(); at != LaneList::kNone;
           at = LaneList::next(state.links, at))
        CHECK(layer.table.count_ram_slots(state.lanes[at].lease.experts) <= layer.table.n_slots());
    }
    // No trade makes slots or loses them.
    std::map<std::uint32_t, std::int64_t> n_more;  // by slot class, than at first and were opened since
    for (std::size_t i = 0; i < model->layers.size(); ++i) {
      const LayerState& layer = model->layers[i];
      CHECK(n_promised[i] == layer.n_promised);
      n_more[layer.shape.slot_class] += std::int64_t{layer.table.n_slots()} + layer.table.n_closing() +
                                        layer.table.n_draining() - layer.shape.n_slots;
    }
    for (const auto& [slot_class, n] : n_more) CHECK(n == 0);
  }
  std::size_t n_waiting = 0, n_open_flags = 0;
  for (const LaneState& lane : state.lanes) {
    if (lane.is_open) ++n_open_flags;
    CHECK(lane.is_open == (lane.model != nullptr));
    CHECK(lane.is_open || (lane.lease.state == LeaseState::kNone && lane.holds.empty()));
    if (lane.lease.state == LeaseState::kQueued || lane.lease.state == LeaseState::kLoading) ++n_waiting;
  }
  CHECK(n_waiting == n_listed);
  CHECK(n_open_flags == n_open_lanes);
}

}  // namespace moecached
