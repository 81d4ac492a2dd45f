// How many slots a layer has: opening more of them, and moving one from a layer to another.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/residency/brain_state.h"

namespace moecached {

std::uint32_t Brain::open_slots(ModelId id, LayerIndex index, std::uint32_t n) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr) return 0;
  LayerState& layer = State::layer_of(*model, index);
  n = std::min(n, layer.table.n_slots_max() - State::n_taken(layer));
  if (n == 0) return 0;
  layer.shape.n_slots += n;  // what the layer began with, as far as sums and least sizes go
  layer.table.open_slots(n);
  state_->serve_queue(layer);
  return n;
}

bool Brain::State::can_spare_slot(const ModelState& model, const LayerState& layer) const {
  const std::uint32_t n_least = std::min(layer.shape.n_slots, std::max(1u, 2 * model.n_expert_used));
  if (layer.table.n_slots() - layer.table.n_held() <= n_least || layer.table.n_closing() > 0 ||
      layer.table.device().n_slots() > 0 || !layer.queue.empty())
    return false;
  // A lease that is sent back to the queue, as evictions are undone, must still fit then.
  for (std::uint32_t at = layer.loading.first(); at != LaneList::kNone; at = LaneList::next(links, at)) {
    if (!layer.table.fits_beside_held(lanes[at].lease.experts, 1)) return false;
  }
  return true;
}

bool Brain::move_slot(ModelId id, LayerIndex from_index, LayerIndex to_index) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr || from_index == to_index) return false;
  LayerState& from = State::layer_of(*model, from_index);
  LayerState& to = State::layer_of(*model, to_index);
  if (from.shape.slot_class != to.shape.slot_class || State::n_taken(to) >= to.table.n_slots_max() ||
      !state_->can_spare_slot(*model, from))
    return false;
  switch (from.table.close_slot(state_->commands)) {
    case LayerTable::Close::kNoRoom:
      return false;
    case LayerTable::Close::kClosing:
      from.closing_for = to_index;
      ++to.n_promised;
      return true;
    case LayerTable::Close::kClosed:
      to.table.open_slots(1);
      state_->serve_queue(to);
      return true;
  }
  return false;
}

bool Brain::trade_slots(ModelId id, LayerIndex busy) {
  ModelState* model = state_->find_model(id);
  if (model == nullptr || !model->trader || !model->trader->is_due()) return false;
  model->trade_sides.clear();
  for (std::uint32_t i = 0; i < model->layers.size(); ++i) {
    const LayerState& layer = model->layers[i];
    model->trade_sides.push_back({.n_slots = layer.table.n_slots() + layer.n_promised,
                                  .can_give = LayerIndex(i) != busy && state_->can_spare_slot(*model, layer),
                                  .can_take = State::n_taken(layer) < layer.table.n_slots_max()});
  }
  const auto trade = model->trader->choose(model->trade_sides);
  return trade && move_slot(id, trade->from, trade->to);
}

std::vector<std::uint32_t> Brain::share_out(ModelId id, std::span<const std::uint32_t> even) const {
  const ModelState* model = state_->find_model(id);
  if (model == nullptr || !model->trader) return {};
  CHECK(even.size() == model->layers.size());
  std::vector<std::uint32_t> have, goal, room;
  for (std::size_t i = 0; i < even.size(); ++i) {
    const LayerTable& table = model->layers[i].table;
    have.push_back(even[i] == 0 ? 0 : table.n_slots());
    goal.push_back(std::max(even[i], have.back()));
    room.push_back(table.n_slots_max());
  }
  return model->trader->share_out(have, goal, room);
}

void Brain::State::trade_undone(ModelState& model, LayerState& from) {
  LayerState& to = layer_of(model, from.closing_for);
  CHECK(to.n_promised > 0);
  --to.n_promised;
}

}  // namespace moecached
