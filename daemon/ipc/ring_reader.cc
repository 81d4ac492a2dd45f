#include "daemon/ipc/ring_reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace moecached {

namespace {

constexpr std::uint64_t kRecords = MOECACHED_RING_RECORDS;

// The one copy. The client may write the record while it is read: bytes may be torn, but are checked
// afterwards.
moecached_shm_record copy_record(const moecached_shm_lane& lane, std::uint64_t position) {
  moecached_shm_record record;
  const auto* source = reinterpret_cast<const volatile std::uint64_t*>(&lane.ring[position % kRecords]);
  std::uint64_t words[sizeof record / sizeof(std::uint64_t)];
  for (std::size_t i = 0; i < std::size(words); ++i) words[i] = source[i];
  std::memcpy(&record, words, sizeof record);
  return record;
}

bool known_kind(std::uint16_t kind) {
  return kind >= MOECACHED_RECORD_ROUTE && kind <= MOECACHED_RECORD_STREAM;
}

}  // namespace

RingReader::RingReader(moecached_shm_lane& lane, std::span<const LayerLimits> limits)
    : lane_(lane), limits_(limits), tail_(std::atomic_ref(lane.tail).load(std::memory_order_relaxed)) {
  std::uint32_t n_experts = 0;
  for (const LayerLimits& layer : limits) n_experts = std::max(n_experts, layer.n_experts);
  ids_.reserve(n_experts);
  seen_.assign(n_experts, 0);
}

bool RingReader::take_ids(const moecached_shm_record& record, std::uint32_t n_experts) {
  if (record.n_ids == 0 || record.n_ids > MOECACHED_RECORD_IDS) return false;
  for (std::uint32_t i = 0; i < record.n_ids; ++i) {
    const std::uint16_t id = record.ids[i];
    if (id >= n_experts || seen_[id] == stamp_) return false;
    seen_[id] = stamp_;
    ids_.emplace_back(id);
  }
  return true;
}

RingOutcome RingReader::next(LaneMessage* out) {
  *out = LaneMessage{};
  const std::uint64_t head = std::atomic_ref(lane_.head).load(std::memory_order_acquire);
  std::atomic_ref tail(lane_.tail);
  if (head == tail_) return RingOutcome::kEmpty;
  if (head - tail_ > kRecords) {
    // No honest producer runs past the consumer: give up on all of it.
    tail_ = head;
    tail.store(tail_, std::memory_order_release);
    return RingOutcome::kRefused;
  }

  ids_.clear();
  if (++stamp_ == 0) {
    std::fill(seen_.begin(), seen_.end(), 0);
    stamp_ = 1;
  }
  const moecached_shm_record first = copy_record(lane_, tail_);
  moecached_shm_record record = first;
  bool valid = known_kind(first.kind) && first.layer < limits_.size();
  if (known_kind(first.kind)) {
    out->kind = static_cast<moecached_record_kind>(first.kind);
    out->seq = first.seq;
    out->half = first.half & 1u;
  }
  if (valid && first.kind == MOECACHED_RECORD_STREAM) {
    valid = first.half < 2 && first.part < limits_[first.layer].n_parts;
  }
  // The whole chain is consumed, valid or not, so that one bad message does not garble the next.
  for (;;) {
    ++tail_;
    ++records_;
    valid = valid && record.kind == first.kind && record.layer == first.layer && record.seq == first.seq &&
            take_ids(record, limits_[first.layer].n_experts);
    if ((record.flags & MOECACHED_FLAG_MORE) == 0) break;
    if (tail_ == head) {  // a chain is published whole
      valid = false;
      break;
    }
    record = copy_record(lane_, tail_);
  }
  tail.store(tail_, std::memory_order_release);
  if (!valid) return RingOutcome::kRefused;

  out->layer = LayerIndex(first.layer);
  if (first.kind == MOECACHED_RECORD_STREAM) {
    out->part = first.part;
    out->in_place = (first.flags & MOECACHED_FLAG_IN_PLACE) != 0;
  } else {
    out->n_tokens = first.part;
  }
  out->epoch = first.epoch;
  out->prefill = (first.flags & MOECACHED_FLAG_PREFILL) != 0;
  out->ids = ids_;
  return RingOutcome::kMessage;
}

}  // namespace moecached
