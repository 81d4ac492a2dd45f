// What is being read from SSD, and for whom: whole records into slots, single parts into a lane's stream
// buffer, and parts in bulk into pinned memory. Collects the reads of one turn of the core loop and issues
// them together. Thread: core loop. Memory: an operation keeps what it writes into alive (shared_ptr), so
// nothing is unmapped under a read.
#pragma once

#include <cstdint>
#include <deque>
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
};

struct StreamRead {
  std::shared_ptr<SharedModel> model;
  std::shared_ptr<void> buffer_owner;
  std::byte* destination = nullptr;  // expert i goes to destination + i * expert_bytes
  std::uint64_t lane_key = 0;
  LayerIndex layer;
  std::uint32_t part = 0;
  std::uint32_t half = 0;
  std::uint32_t seq = 0;
};

// Parts of experts into memory of any kind: what a model on a GPU is loaded with.
struct BulkRead {
  std::shared_ptr<void> owner;  // of the memory
  std::uint64_t tag = 0;        // of the caller, comes back
};

class ReadTable {
 public:
  explicit ReadTable(SsdTier& ssd);

  void start(SlotRead read);
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
    ReadResult result = ReadResult::kOk;
  };
  [[nodiscard]] std::uint32_t allocate();

  SsdTier& ssd_;
  std::vector<Operation> operations_;
  std::vector<std::uint32_t> free_;
  std::deque<ReadRequest> backlog_, bulk_backlog_;
  std::size_t bulk_submitted_ = 0;
  std::size_t in_flight_ = 0;
};

}  // namespace moecached
