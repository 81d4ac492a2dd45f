// What is being read from SSD, and for whom: whole records into slots, single parts into a lane's stream
// buffer, and parts in bulk into pinned memory. Collects the reads of one turn of the core loop and issues
// them together. Thread: core loop. Memory: an operation keeps what it writes into alive (shared_ptr), so
// nothing is unmapped under a read.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/ipc/shared_model.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

struct SlotRead {
  std::shared_ptr<SharedModel> model;
  LayerIndex layer;
  ExpertIndex expert;
  SlotIndex slot;
  bool is_ahead = false;  // nobody waits for it
};

struct StreamRead {
  std::shared_ptr<SharedModel> model;
  std::shared_ptr<void> buffer_owner;
  std::byte* destination = nullptr;  // a half: experts lie there packed, or as proto/shm/stream_place.h says
  bool in_place = false;             // the latter; REQUIRES: they fit, and destination begins a page
  std::uint64_t lane_key = 0;
  LayerIndex layer;
  std::uint32_t part = 0;
  std::uint32_t half = 0;
  std::uint32_t seq = 0;
};

// Parts of experts into memory of any kind: what a model on a GPU is loaded with, or what slots are compared
// with.
struct BulkRead {
  std::shared_ptr<void> owner;                   // of the memory
  std::uint64_t tag = 0;                         // of the caller, comes back
  std::function<void(ReadResult)> on_done = {};  // who is told, in place of the GPU service
};

// Reads that nobody waits for go behind those that somebody waits for: they are submitted last, and only so
// many at once that they never fill more than half of the disk's queue. A read that comes then waits for one
// of them at most in each place of the queue.
class ReadTable {
 public:
  ReadTable(SsdTier& ssd, const SsdOptions& options);

  void start(SlotRead read);
  // Somebody waits now for what was started as is_ahead; nothing to do where it was submitted already.
  void hasten(ModelId model, LayerIndex layer, SlotIndex slot);
  void start(StreamRead read, std::span<const ExpertIndex> experts);
  void start(BulkRead read, std::span<const PartRead> parts);
  void flush();  // submits what was started since the last flush, and what did not fit before

  struct SlotDone {
    SlotRead read;
    ReadResult result = ReadResult::kOk;
  };
  struct StreamDone {
    StreamRead read;
    ReadResult result = ReadResult::kOk;
    std::uint64_t bytes = 0;
    std::uint32_t parts = 0;
  };
  struct BulkDone {
    BulkRead read;
    ReadResult result = ReadResult::kOk;
    std::uint64_t bytes = 0;
  };
  void poll(std::vector<SlotDone>* slots, std::vector<StreamDone>* streams, std::vector<BulkDone>* bulk);
  [[nodiscard]] std::size_t in_flight() const { return in_flight_; }

 private:
  struct Operation {
    enum class Kind : std::uint8_t { kSlot, kStream, kBulk } kind = Kind::kSlot;
    SlotRead slot;
    StreamRead stream;
    BulkRead bulk;
    std::uint32_t requests_left = 0;
    std::uint32_t parts = 0;
    std::uint64_t bytes = 0;
    std::uint64_t ahead_reads = 0;  // of the disk's queue, as long as it is submitted as is_ahead
    ReadResult result = ReadResult::kOk;
  };
  [[nodiscard]] std::uint32_t allocate();
  [[nodiscard]] std::uint64_t reads_of(const ReadRequest& request) const;
  void submit_ahead();

  SsdTier& ssd_;
  const std::uint64_t read_bytes_max_, ahead_reads_max_;
  std::vector<Operation> operations_;
  std::vector<std::uint32_t> free_;
  std::deque<ReadRequest> backlog_, bulk_backlog_, ahead_backlog_;
  std::uint64_t ahead_reads_ = 0;  // submitted
  std::size_t bulk_submitted_ = 0;
  std::size_t in_flight_ = 0;
};

}  // namespace moecached
