#include "daemon/ipc/lane_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "daemon/platform/futex.h"

namespace moecached {
namespace {

// How long one wait may last before somebody looks whether the client is still there: gRPC wakes no futex.
constexpr std::uint64_t kWaitSliceNs = 20'000'000;
// A full ring has no futex: the core loop publishes `tail` without a wake.
constexpr std::chrono::microseconds kRoomSlice(200);

std::uint64_t records_for(std::size_t n_ids) {
  return (n_ids + MOECACHED_RECORD_IDS - 1) / MOECACHED_RECORD_IDS;
}

moecached_shm_record record_of(moecached_record_kind kind, const LaneWriter::Batch& batch) {
  moecached_shm_record record{};
  record.kind = static_cast<std::uint16_t>(kind);
  record.flags = batch.prefill ? MOECACHED_FLAG_PREFILL : 0;
  record.layer = static_cast<std::uint16_t>(batch.layer);
  record.part = static_cast<std::uint16_t>(std::min<std::uint32_t>(batch.n_tokens, UINT16_MAX));
  return record;
}

}  // namespace

LaneWriter::LaneWriter(Session& session, std::uint32_t model_id)
    : session_(session), words_(session.lane(0)) {
  std::atomic_ref(words_.model_id).store(model_id, std::memory_order_seq_cst);
  std::atomic_ref(words_.state).store(1, std::memory_order_seq_cst);
}

void LaneWriter::close() {
  complete();
  std::atomic_ref(words_.state).store(0, std::memory_order_release);
}

void LaneWriter::begin(std::uint32_t layer) {
  complete();
  ++epoch_;
  // A full barrier: no entry may be loaded before the core loop can see that this lane has begun.
  (void)std::atomic_ref(words_.begun).exchange(epoch_ << 16 | layer, std::memory_order_seq_cst);
}

void LaneWriter::complete() { std::atomic_ref(words_.completed).store(epoch_, std::memory_order_release); }

bool LaneWriter::has_room(std::size_t n_ids) const {
  const std::uint64_t unread = head_ - std::atomic_ref(words_.tail).load(std::memory_order_acquire);
  return records_for(n_ids) + unread <= MOECACHED_RING_RECORDS;
}

void LaneWriter::publish(const moecached_shm_record& as, std::span<const std::uint16_t> ids) {
  while (!ids.empty()) {
    const std::size_t n = std::min<std::size_t>(ids.size(), MOECACHED_RECORD_IDS);
    moecached_shm_record& record = words_.ring[head_ % MOECACHED_RING_RECORDS];
    record = as;
    if (n < ids.size()) record.flags |= MOECACHED_FLAG_MORE;
    record.n_ids = static_cast<std::uint16_t>(n);
    std::copy_n(ids.begin(), n, record.ids);
    ids = ids.subspan(n);
    ++head_;
  }
  std::atomic_ref(words_.head).store(head_, std::memory_order_release);
}

void LaneWriter::count_lookups(std::uint64_t n) {
  std::atomic_ref(words_.lookups).fetch_add(n, std::memory_order_relaxed);
}

void LaneWriter::post_route(const Batch& batch, std::span<const std::uint16_t> ids) {
  if (!has_room(ids.size())) {
    std::atomic_ref(words_.dropped).fetch_add(records_for(ids.size()), std::memory_order_relaxed);
    return;
  }
  moecached_shm_record record = record_of(MOECACHED_RECORD_ROUTE, batch);
  record.epoch = epoch_;
  publish(record, ids);
}

std::optional<moecached_grant_status> LaneWriter::lease(const Batch& batch,
                                                        std::span<const std::uint16_t> ids,
                                                        const std::function<bool()>& gone) {
  while (!has_room(ids.size())) {
    session_.doorbell().signal();
    if (gone()) return std::nullopt;
    std::this_thread::sleep_for(kRoomSlice);
  }
  moecached_shm_record record = record_of(MOECACHED_RECORD_LEASE, batch);
  record.seq = ++lease_seq_;
  record.epoch = epoch_ + 1;
  publish(record, ids);
  session_.doorbell().signal();
  const std::atomic_ref done(words_.lease_done);
  for (std::uint32_t seen = done.load(std::memory_order_acquire); seen != lease_seq_;
       seen = done.load(std::memory_order_acquire)) {
    if (gone()) return std::nullopt;
    (void)futex_wait(&words_.lease_done, seen, kWaitSliceNs);
  }
  return static_cast<moecached_grant_status>(words_.lease_status);
}

}  // namespace moecached
