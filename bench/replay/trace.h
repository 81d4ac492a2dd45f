// A routing trace in memory: who asked for which experts, token by token, layer by layer. Read from
// moetrace-csv v1:
//
//   line 1  "# moetrace-csv v1 " and a JSON object: layers, experts, k (columns of a layer), where it is from
//   line 2  seq,tok,phase,L0_0,L0_1,...: the names of the columns
//   then    a row a token; phase 0 prefill, 1 decode; -1: no id (not recorded, or fewer than k)
//
// All ids of one row and one layer are one event: they were asked for together. Thread: any, read-only once
// read. Memory: two bytes an id, at most ReadLimits::bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"

namespace moecached::replay {

struct TraceHeader {
  std::string model, source, licence;
  std::uint32_t n_layers = 0, n_experts = 0;
  std::uint32_t k = 0;       // columns of one layer
  std::uint32_t n_used = 0;  // experts of a token: k, unless rows hold batches of several tokens
  bool is_synthetic = false;
  // Of a recording: as the daemon was set up. Empty: unknown.
  std::string policy;
  std::vector<std::uint32_t> n_slots;  // by layer
  std::uint64_t dropped = 0;           // events that the recorder lost
};

struct TraceRow {
  std::int64_t seq = 0;
  std::int64_t tok = 0;
  bool is_decode = true;
};

class Trace {
 public:
  static constexpr std::uint16_t kNone = 0xffff;

  struct ReadLimits {
    std::uint64_t bytes = 4ull << 30;
  };
  // kInvalid: the text names line and column. kLimit: larger than `limits`.
  [[nodiscard]] static Result<Trace> read(const std::string& path, ReadLimits limits);
  // For traces that are made: rows are added one by one. REQUIRES: layers, experts and k of the header are
  // set.
  explicit Trace(TraceHeader header) : header_(std::move(header)) {}

  // The ids of all layers, k each, kNone where there is none. The text says which id is wrong; kInvalid.
  [[nodiscard]] Status add(const TraceRow& row, std::span<const std::uint16_t> ids);

  [[nodiscard]] const TraceHeader& header() const { return header_; }
  [[nodiscard]] std::size_t size() const { return rows_.size(); }
  [[nodiscard]] const TraceRow& row(std::size_t index) const { return rows_[index]; }
  // Distinct ids, in the order of the row; empty when none was recorded.
  [[nodiscard]] std::span<const std::uint16_t> event(std::size_t row, std::uint32_t layer) const {
    const std::uint16_t* at = ids_.data() + (row * header_.n_layers + layer) * header_.k;
    std::size_t n = header_.k;
    while (n > 0 && at[n - 1] == kNone) --n;
    return {at, n};
  }
  [[nodiscard]] std::uint32_t n_sequences() const;

 private:
  TraceHeader header_;
  std::vector<TraceRow> rows_;
  std::vector<std::uint16_t> ids_;   // by row, layer; those that are there come first
  std::vector<std::uint64_t> seen_;  // scratch: event that last named the expert
  std::uint64_t event_ = 0;
};

}  // namespace moecached::replay
