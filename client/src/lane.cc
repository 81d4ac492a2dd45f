#include "client/src/lane.h"

#include <algorithm>

#include "client/src/error.h"

namespace moecached::client {
namespace {

// More rows than this are taken for a prompt batch. A batch of single tokens of many sequences is rarely as
// large, and the flag only tells the daemon's policy how much to read into the routing.
constexpr std::size_t kPrefillRows = 32;

LaneChannel::Batch batch_of(std::size_t rows) {
  LaneChannel::Batch batch;
  if (rows > kPrefillRows) batch.flags = MOECACHED_FLAG_PREFILL;
  batch.n_tokens = static_cast<std::uint16_t>(std::min<std::size_t>(rows, UINT16_MAX));
  return batch;
}

}  // namespace

Lane::Lane(const Model& model, ModelMapping& mapping, Connection& connection, LaneBlock* block)
    : model_(model),
      mapping_(&mapping),
      block_(block),
      channel_(&connection, block),
      stamp_(mapping.layout.n_experts_max),
      slot_of_(mapping.layout.n_experts_max),
      was_hit_(mapping.layout.n_experts_max),
      distinct_(mapping.layout.n_experts_max) {
  pins_.reserve(mapping.layout.n_experts_max);
  for (StreamHalf& half : halves_) half.experts.reserve(mapping.layout.n_experts_max);
}

moecached_status Lane::resolve(std::uint32_t layer, const IdMatrix& ids, std::int32_t* slots_out) {
  if (layer >= mapping_->views.size()) [[unlikely]] {
    return fail(MOECACHED_E_ARGUMENT, "the model has %zu MoE layers, there is none with index %u",
                mapping_->views.size(), layer);
  }
  const LayerView view = mapping_->views[layer];
  if (!gather(ids, view.n_experts)) [[unlikely]] {
    return fail(MOECACHED_E_ARGUMENT,
                "an expert id is not in [0, %u), or the row stride is not a multiple of 4", view.n_experts);
  }
  // A hint, as the daemon may change it at any time; it answers a lease that does not fit with a refusal.
  const std::uint32_t n_open = load_relaxed(view.n_slots_open);
  if (n_distinct_ > n_open) [[unlikely]] {
    end();
    return fail(MOECACHED_E_TOO_MANY, "%zu distinct experts, but the layer has %u slots: stream them",
                n_distinct_, n_open);
  }
  begin(layer);
  const std::uint64_t n_pairs = ids.rows * ids.cols;
  const LaneChannel::Batch batch = batch_of(ids.rows);
  std::uint64_t hits = n_pairs;
  if (load_entries(view) > 0) [[unlikely]] {
    if (const auto status = serve_absent(layer, batch)) {
      end();
      return status;
    }
    hits = count_hits(ids);
  } else {
    note_route(layer, batch, {distinct_.data(), n_distinct_});
  }
  scatter(ids, slots_out);
  note_lookups(n_pairs, hits);
  return MOECACHED_OK;
}

moecached_status Lane::resolve_resident(std::uint32_t layer, std::span<const std::int32_t> experts,
                                        std::int32_t* slots_out) {
  if (layer >= mapping_->views.size()) {
    return fail(MOECACHED_E_ARGUMENT, "the model has %zu MoE layers, there is none with index %u",
                mapping_->views.size(), layer);
  }
  const LayerView view = mapping_->views[layer];
  const IdMatrix ids{experts.data(), 1, experts.size(), 0};
  if (!gather(ids, view.n_experts) || n_distinct_ != experts.size()) {
    return fail(MOECACHED_E_ARGUMENT, "an expert id is not in [0, %u), or given twice", view.n_experts);
  }
  begin(layer);
  const std::size_t n_resident = n_distinct_ - load_entries(view);
  scatter(ids, slots_out);
  // No record will say so, and the streaming of the others may take long.
  if (n_resident == 0) channel_.complete();
  // Only what is used here was routed to slots; the absent ones are going to be streamed, which has its own
  // record.
  const auto resident = [this](std::uint16_t expert) { return slot_of_[expert] >= 0; };
  std::partition(distinct_.begin(), distinct_.begin() + static_cast<std::ptrdiff_t>(n_distinct_), resident);
  if (n_resident > 0) note_route(layer, {.flags = MOECACHED_FLAG_PREFILL}, {distinct_.data(), n_resident});
  note_lookups(n_resident, n_resident);
  return MOECACHED_OK;
}

void Lane::end() {
  if (!pins_.empty()) release_pins();
  channel_.complete();
}

// Collects the distinct ids. A stamp per expert instead of a set to be cleared: no work but one compare per
// id.
bool Lane::gather(const IdMatrix& ids, std::uint32_t n_experts) {
  if (++stamp_now_ == 0) [[unlikely]] {
    std::fill(stamp_.begin(), stamp_.end(), 0);
    stamp_now_ = 1;
  }
  if (ids.row_stride_bytes % sizeof(std::int32_t) != 0) [[unlikely]]
    return false;
  std::size_t n = 0;
  for (std::size_t row = 0; row < ids.rows; ++row) {
    const std::int32_t* const at = ids.row(row);
    for (std::size_t col = 0; col < ids.cols; ++col) {
      const std::uint32_t id = static_cast<std::uint32_t>(at[col]);  // negative ids become large ones
      if (id >= n_experts) [[unlikely]]
        return false;
      if (stamp_[id] == stamp_now_) continue;
      stamp_[id] = stamp_now_;
      distinct_[n++] = static_cast<std::uint16_t>(id);
    }
  }
  n_distinct_ = n;
  return true;
}

// Returns how many are absent. An entry that is no slot of this layer counts as absent: the file is never
// wrong.
std::size_t Lane::load_entries(const LayerView& view) {
  std::size_t absent = 0;
  for (std::size_t i = 0; i < n_distinct_; ++i) {
    const std::uint16_t expert = distinct_[i];
    // Acquire at least, for the bytes of the slot; sequentially consistent pairs it with the fence in
    // begin().
    const std::int32_t slot = load_seq_cst(view.entries + expert);
    const bool present = is_present(view, slot);
    slot_of_[expert] = present ? slot : MOECACHED_ABSENT;
    absent += !present;
  }
  return absent;
}

void Lane::scatter(const IdMatrix& ids, std::int32_t* slots_out) const {
  for (std::size_t row = 0; row < ids.rows; ++row) {
    const std::int32_t* const at = ids.row(row);
    for (std::size_t col = 0; col < ids.cols; ++col)
      *slots_out++ = slot_of_[static_cast<std::size_t>(at[col])];
  }
}

void Lane::begin(std::uint32_t layer) {
  if (!pins_.empty()) [[unlikely]]
    release_pins();
  channel_.begin(layer);
}

void Lane::note_route(std::uint32_t layer, LaneChannel::Batch batch, std::span<const std::uint16_t> ids) {
  if (ids.empty() || !channel_.connection().connected()) [[unlikely]]
    return;
  const std::uint64_t dropped = channel_.post_route(layer, batch, ids);
  if (dropped > 0) [[unlikely]] {
    counters_.dropped_records.add(dropped);
    add_to_own_word(&channel_.words().dropped, dropped);
  }
}

void Lane::note_lookups(std::uint64_t lookups, std::uint64_t hits) {
  counters_.lookups.add(lookups);
  counters_.hits.add(hits);
  add_to_own_word(&channel_.words().lookups, lookups);
}

void Lane::note_fallback(std::uint64_t reads, std::uint64_t bytes) {
  counters_.fallback_reads.add(reads);
  counters_.fallback_bytes.add(bytes);
  add_to_own_word(&channel_.words().fallback_reads, reads);
  add_to_own_word(&channel_.words().fallback_bytes, bytes);
}

void Lane::attach(ModelMapping& mapping, Connection& connection, LaneBlock* block) {
  mapping_ = &mapping;
  ++attachment_;
  n_device_slots_ = 0;
  block_ = block;
  channel_ = LaneChannel(&connection, block);
  for (StreamHalf& half : halves_) {
    // What the last daemon streamed went away with its segment; this process's own buffer stays.
    if (half.state == StreamHalf::State::kIdle) continue;
    if (half.state == StreamHalf::State::kReady && half.data == half.buffer.data()) continue;
    half.state = StreamHalf::State::kToReadHere;
  }
  // So that the new daemon can tell its operator what was read without one.
  add_to_own_word(&channel_.words().fallback_reads, counters_.fallback_reads.value());
  add_to_own_word(&channel_.words().fallback_bytes, counters_.fallback_bytes.value());
}

}  // namespace moecached::client
