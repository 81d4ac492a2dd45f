#include "client/src/lane_channel.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>

namespace moecached::client {
namespace {

using std::chrono::steady_clock;

// How long one futex wait may last before the daemon's life is looked after: nobody wakes the futex of a dead
// daemon.
constexpr long kWaitSliceNs = 20'000'000;
// A full ring has no futex: the daemon publishes `tail` without a wake. It drains 2048 records in well under
// this.
constexpr long kRoomSliceNs = 200'000;

Answer from_status(std::uint32_t status) {
  switch (status) {
    case MOECACHED_GRANT_OK:
      return Answer::kGranted;
    case MOECACHED_GRANT_IO_ERROR:
      return Answer::kIoError;
    case MOECACHED_GRANT_MODEL_CHANGED:
      return Answer::kModelChanged;
    case MOECACHED_GRANT_NO_ROOM:
      return Answer::kNoRoom;
    default:
      return Answer::kRefused;
  }
}

}  // namespace

void LaneChannel::publish(const Request& request, std::span<const std::uint16_t> ids) noexcept {
  moecached_shm_lane& lane = *block_->words;
  std::uint64_t head = block_->head;
  while (!ids.empty()) {
    const std::size_t n = std::min<std::size_t>(ids.size(), MOECACHED_RECORD_IDS);
    const bool more = n < ids.size();
    moecached_shm_record& record = lane.ring[head % MOECACHED_RING_RECORDS];
    record.kind = request.kind;
    record.flags = static_cast<std::uint16_t>(request.flags | (more ? MOECACHED_FLAG_MORE : 0));
    record.layer = request.layer;
    record.n_ids = static_cast<std::uint16_t>(n);
    record.seq = request.seq;
    record.part = request.part;
    record.half = request.half;
    record.epoch = request.epoch;
    std::memcpy(record.ids, ids.data(), n * sizeof(std::uint16_t));
    ids = ids.subspan(n);
    ++head;
  }
  block_->head = head;
  store_release(&lane.head, head);
}

Answer LaneChannel::publish_when_room(const Request& request, std::span<const std::uint16_t> ids) noexcept {
  const auto give_up = steady_clock::now() + connection_->patience();
  while (!has_room(records_for(ids.size()))) {
    connection_->ring_doorbell();
    if (!connection_->check_alive()) return Answer::kGone;
    const std::uint64_t tail = load_acquire(&block_->words->tail);
    if (tail == block_->stuck_tail || steady_clock::now() >= give_up) {
      block_->stuck_tail = tail;  // not waited for again until it has moved
      return Answer::kNoAnswer;
    }
    const timespec slice{0, kRoomSliceNs};
    ::nanosleep(&slice, nullptr);
  }
  publish(request, ids);
  connection_->ring_doorbell();
  return Answer::kGranted;
}

Answer LaneChannel::wait_for(const std::uint32_t* done, const std::uint32_t* status,
                             std::uint32_t seq) noexcept {
  const auto give_up = steady_clock::now() + connection_->patience();
  for (;;) {
    const std::uint32_t seen = load_acquire(done);
    if (seen == seq) return from_status(load_relaxed(status));
    if (!connection_->check_alive()) {
      // Its last act may have been the answer.
      return load_acquire(done) == seq ? from_status(load_relaxed(status)) : Answer::kGone;
    }
    if (steady_clock::now() >= give_up) return Answer::kNoAnswer;
    const timespec slice{0, kWaitSliceNs};
    // Not FUTEX_PRIVATE: the waker is another process. Every return (woken, timeout, signal) leads to another
    // look.
    ::syscall(SYS_futex, done, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
}

Answer LaneChannel::lease(std::uint32_t layer, Batch batch, std::span<const std::uint16_t> ids) noexcept {
  if (!connection_->check_alive()) return Answer::kGone;
  moecached_shm_lane& lane = *block_->words;
  // One unanswered request is enough: each further miss would wait out the daemon's patience again.
  if (block_->lease_unanswered && load_acquire(&lane.lease_done) != block_->lease_seq) {
    return Answer::kNoAnswer;
  }
  Request request;
  request.kind = MOECACHED_RECORD_LEASE;
  request.flags = batch.flags;
  request.layer = static_cast<std::uint16_t>(layer);
  request.part = batch.n_tokens;
  request.seq = block_->lease_seq + 1;
  request.epoch = block_->epoch + 1;
  const Answer posted = publish_when_room(request, ids);
  if (posted != Answer::kGranted) return posted;
  block_->lease_seq = request.seq;
  const Answer answer = wait_for(&lane.lease_done, &lane.lease_status, request.seq);
  block_->lease_unanswered = answer == Answer::kNoAnswer;
  return answer;
}

Answer LaneChannel::stream_begin(const StreamRequest& wanted, std::span<const std::uint16_t> ids) noexcept {
  if (!connection_->check_alive()) return Answer::kGone;
  if (!stream_idle(wanted.half)) return Answer::kNoAnswer;
  Request request;
  request.kind = MOECACHED_RECORD_STREAM;
  request.layer = static_cast<std::uint16_t>(wanted.layer);
  request.part = static_cast<std::uint16_t>(wanted.part);
  request.half = static_cast<std::uint16_t>(wanted.half);
  request.flags = wanted.in_place ? MOECACHED_FLAG_IN_PLACE : 0;
  request.seq = block_->stream_seq[wanted.half] + 1;
  const Answer posted = publish_when_room(request, ids);
  if (posted == Answer::kGranted) block_->stream_seq[wanted.half] = request.seq;
  return posted;
}

Answer LaneChannel::stream_wait(std::uint32_t half) noexcept {
  moecached_shm_lane& lane = *block_->words;
  return wait_for(&lane.stream_done[half], &lane.stream_status[half], block_->stream_seq[half]);
}

}  // namespace moecached::client
