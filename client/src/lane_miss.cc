// The slow half of Lane::resolve: experts that are not resident.
#include <algorithm>
#include <memory>

#include "client/src/error.h"
#include "client/src/lane.h"
#include "client/src/shared_words.h"

namespace moecached::client {
namespace {

// A granted lease whose entries are absent again would be a fault of the daemon; the file is right in any
// case.
constexpr int kLeaseAttempts = 3;

}  // namespace

// REQUIRES: the lane is in an epoch of `layer`, the entries are loaded, at least one is absent. Leaves it in
// an epoch of the layer with all of them present, or returns why not.
moecached_status Lane::serve_absent(std::uint32_t layer, LaneChannel::Batch batch) {
  const LayerView& view = mapping_->views[layer];
  for (std::size_t i = 0; i < n_distinct_; ++i) was_hit_[distinct_[i]] = slot_of_[distinct_[i]] >= 0;

  bool asked_daemon = false;
  for (int attempt = 0; attempt < kLeaseAttempts; ++attempt) {
    // The epoch used nothing. Holding it during the wait could block the very eviction that the lease needs.
    channel_.complete();
    const std::uint32_t seq_before = block_->lease_seq;
    // All of them, not the absent ones alone: those present now may be evicted while the lane waits.
    const Answer answer = channel_.lease(layer, batch, {distinct_.data(), n_distinct_});
    if (block_->lease_seq != seq_before) {
      asked_daemon = true;
      counters_.leases.add(1);
    }
    // Also to give up: the daemon knows of this epoch that it uses nothing but these experts.
    channel_.begin(layer);
    if (answer == Answer::kModelChanged) {
      return fail(MOECACHED_E_MODEL_CHANGED,
                  "%s has changed since the daemon opened it: restart to use the new file",
                  model_.files.first_path());
    }
    if (load_entries(view) == 0) return MOECACHED_OK;
    const std::uint32_t n_open = load_relaxed(view.n_slots_open);
    // Refused: the layer has given slots to another since resolve() looked.
    if (answer == Answer::kNoRoom || (answer == Answer::kRefused && n_distinct_ > n_open)) {
      return fail(MOECACHED_E_TOO_MANY,
                  "%zu distinct experts do not fit beside what decode uses or stalled processes keep of the "
                  "layer's %u slots: "
                  "stream them",
                  n_distinct_, n_open);
    }
    if (answer != Answer::kGranted) break;
  }
  return read_absent(layer, asked_daemon);
}

// The entries that are present stay so: the lane is in an epoch of the layer. The others come from private
// slots.
moecached_status Lane::read_absent(std::uint32_t layer, bool asked_daemon) {
  const auto first = distinct_.begin();
  const auto absent_end = std::partition(first, first + static_cast<std::ptrdiff_t>(n_distinct_),
                                         [this](std::uint16_t expert) { return slot_of_[expert] < 0; });
  const std::span<const std::uint16_t> absent(first, absent_end);
  const auto was_read = std::make_unique<bool[]>(absent.size());
  const LayerLayout& layout = mapping_->layout.layers[layer];
  std::uint64_t reads = 0;
  std::uint64_t bytes = 0;
  const PrivateSlots::Read read = [&](std::uint32_t expert, std::byte* record) {
    const moecached_status status = model_.files.read_expert(layout, expert, record, &bytes);
    reads += status == MOECACHED_OK;
    return status;
  };
  pins_.resize(absent.size());
  const moecached_status status =
      mapping_->windows[layer].private_slots->acquire(absent, read, pins_.data(), was_read.get());
  note_fallback(reads, bytes);
  if (status != MOECACHED_OK) {
    pins_.clear();
    return status;
  }
  pinned_layer_ = layer;
  for (std::size_t i = 0; i < absent.size(); ++i) {
    slot_of_[absent[i]] = pins_[i];
    if (!asked_daemon) was_hit_[absent[i]] = !was_read[i];
  }
  return MOECACHED_OK;
}

moecached_status Lane::read_alone(std::uint32_t layer, std::span<const std::int32_t> experts,
                                  const Records& to) {
  const LayerLayout& layout = mapping_->layout.layers[layer];
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (const auto status = model_.files.read_expert(layout, static_cast<std::uint32_t>(experts[i]),
                                                     to.memory + i * to.stride, &bytes)) {
      return status;
    }
  }
  note_fallback(experts.size(), bytes);
  note_lookups(experts.size(), 0);
  return MOECACHED_OK;
}

void Lane::release_pins() {
  mapping_->windows[pinned_layer_].private_slots->release(pins_);
  pins_.clear();
}

std::uint64_t Lane::count_hits(const IdMatrix& ids) const {
  std::uint64_t hits = 0;
  for (std::size_t row = 0; row < ids.rows; ++row) {
    const std::int32_t* const at = ids.row(row);
    for (std::size_t col = 0; col < ids.cols; ++col) hits += was_hit_[static_cast<std::size_t>(at[col])];
  }
  return hits;
}

}  // namespace moecached::client
