// The client's side of the lane protocol in proto/shm/layout.h: epochs, the ring of records, waits for
// answers. It knows nothing of slots' contents or of files. The memory orders are the ones written down
// there. Thread: the lane's own, one at a time. Memory: borrows block and connection; allocates nothing.
#pragma once

#include <cstdint>
#include <span>

#include "client/src/connection.h"
#include "client/src/shared_words.h"

namespace moecached::client {

enum class Answer {
  kGranted,
  kIoError,  // the daemon could not read
  kModelChanged,
  kRefused,
  kNoRoom,    // stalled lanes, or for a prompt decode, keep too many slots of the layer: to be streamed
  kNoAnswer,  // the daemon lives, but its patience is used up, or an older request is still unanswered
  kGone,      // the daemon is gone
};

class LaneChannel {
 public:
  LaneChannel(Connection* connection, LaneBlock* block) noexcept : connection_(connection), block_(block) {}

  [[nodiscard]] std::uint64_t epoch() const noexcept { return block_->epoch; }
  [[nodiscard]] Connection& connection() const noexcept { return *connection_; }
  [[nodiscard]] moecached_shm_lane& words() const noexcept { return *block_->words; }
  [[nodiscard]] std::uint32_t index() const noexcept { return block_->index; }

  // Steps 1 and 2 of the protocol: ends the last epoch, begins the next one in `layer`. Entries loaded after
  // it stay valid until complete() or the next begin().
  void begin(std::uint32_t layer) noexcept {
    moecached_shm_lane& lane = *block_->words;
    store_release(&lane.completed, block_->epoch);
    ++block_->epoch;
    store_then_fence(&lane.begun, block_->epoch << 16 | layer);
  }

  // The lane uses nothing any more. Nobody is told: a daemon that waits for it looks every millisecond.
  void complete() noexcept { store_release(&block_->words->completed, block_->epoch); }

  // What a ROUTE or LEASE record says of the batch that its ids come from.
  struct Batch {
    std::uint16_t flags = 0;
    std::uint16_t n_tokens = 0;  // the ids are their union; 0: not told
  };

  // Never waits. Returns how many records were dropped because the ring has no room for all of them.
  std::uint64_t post_route(std::uint32_t layer, Batch batch, std::span<const std::uint16_t> ids) noexcept {
    const std::uint64_t n_records = records_for(ids.size());
    if (!has_room(n_records)) [[unlikely]]
      return n_records;
    Request request;
    request.kind = MOECACHED_RECORD_ROUTE;
    request.flags = batch.flags;
    request.layer = static_cast<std::uint16_t>(layer);
    request.part = batch.n_tokens;
    request.epoch = block_->epoch;
    publish(request, ids);
    return 0;
  }

  // Asks for experts to be kept resident until `completed` reaches the epoch after the current one, and
  // waits. REQUIRES: complete() was called: the current epoch uses nothing. The caller's next begin() is the
  // leased epoch.
  [[nodiscard]] Answer lease(std::uint32_t layer, Batch batch, std::span<const std::uint16_t> ids) noexcept;

  struct StreamRequest {
    std::uint32_t layer = 0;
    std::uint32_t part = 0;
    std::uint32_t half = 0;
    bool in_place = false;  // as proto/shm/stream_place.h says; else packed
  };
  // Posts a read into half of the lane's stream buffer; waits only if the ring is full. kGranted: posted.
  [[nodiscard]] Answer stream_begin(const StreamRequest& request,
                                    std::span<const std::uint16_t> ids) noexcept;
  [[nodiscard]] Answer stream_wait(std::uint32_t half) noexcept;
  // No request on this half is under way; otherwise the daemon may write into it at any time.
  [[nodiscard]] bool stream_idle(std::uint32_t half) const noexcept {
    return load_acquire(&block_->words->stream_done[half]) == block_->stream_seq[half];
  }

 private:
  struct Request {  // what all records of one list have in common
    std::uint16_t kind = 0;
    std::uint16_t flags = 0;
    std::uint16_t layer = 0;
    std::uint16_t part = 0;
    std::uint16_t half = 0;
    std::uint32_t seq = 0;
    std::uint64_t epoch = 0;
  };

  static std::uint64_t records_for(std::size_t n_ids) noexcept {
    return (n_ids + MOECACHED_RECORD_IDS - 1) / MOECACHED_RECORD_IDS;
  }

  // A tail beyond the head cannot be; the difference is huge then, and the ring counts as full.
  [[nodiscard]] bool has_room(std::uint64_t n_records) const noexcept {
    const std::uint64_t unread = block_->head - load_acquire(&block_->words->tail);
    return unread <= MOECACHED_RING_RECORDS && n_records <= MOECACHED_RING_RECORDS - unread;
  }

  // REQUIRES: has_room() for it.
  void publish(const Request& request, std::span<const std::uint16_t> ids) noexcept;
  [[nodiscard]] Answer publish_when_room(const Request& request, std::span<const std::uint16_t> ids) noexcept;
  [[nodiscard]] Answer wait_for(const std::uint32_t* done, const std::uint32_t* status,
                                std::uint32_t seq) noexcept;

  Connection* connection_;
  LaneBlock* block_;
};

}  // namespace moecached::client
