// Reads one lane's ring of records. Everything in it was written by a client and is hostile: each record is
// copied once and only the copy is checked; a message leaves here with ids in range and distinct, or not at
// all. Thread: core loop. Memory: sized at construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "proto/shm/layout.h"

namespace moecached {

struct LayerLimits {
  std::uint32_t n_experts = 0;
  std::uint32_t n_parts = 0;
};

struct LaneMessage {
  moecached_record_kind kind = MOECACHED_RECORD_ROUTE;
  LayerIndex layer;
  std::uint32_t part = 0, half = 0;  // STREAM
  std::uint32_t seq = 0;             // LEASE, STREAM
  std::uint64_t epoch = 0;           // ROUTE, LEASE: the epoch that uses the ids
  bool prefill = false;
  bool in_place = false;       // STREAM
  std::uint32_t n_tokens = 0;  // ROUTE, LEASE: the ids are their union; 0: the client does not say
  std::span<const ExpertIndex> ids;  // valid until the next call of next()
};

enum class RingOutcome : std::uint8_t {
  kEmpty,
  kMessage,
  kRefused,  // out of range, malformed, or an impossible head; `out` names kind, seq and half where they
             // could be read
};

class RingReader {
 public:
  // `limits` outlives the reader: one entry per layer of the lane's model.
  RingReader(moecached_shm_lane& lane, std::span<const LayerLimits> limits);

  [[nodiscard]] RingOutcome next(LaneMessage* out);
  [[nodiscard]] std::uint64_t records() const { return records_; }

 private:
  [[nodiscard]] bool take_ids(const moecached_shm_record& record, std::uint32_t n_experts);

  moecached_shm_lane& lane_;
  std::span<const LayerLimits> limits_;
  std::vector<ExpertIndex> ids_;
  std::vector<std::uint32_t> seen_;  // stamp of the message that last named the expert
  std::uint32_t stamp_ = 0;
  std::uint64_t tail_ = 0;
  std::uint64_t records_ = 0;
};

}  // namespace moecached
