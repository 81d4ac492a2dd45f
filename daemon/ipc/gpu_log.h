// Reads one entry of a lane's log on a GPU: which layers an epoch computed, and the slots that it used. A
// client wrote the header, its GPU the slots, and both may write on: every word is copied once, and only the
// copy is checked. Layers and counts come out in range; what a slot stands for, GpuService knows. Pure.
// Thread: core loop. Memory: sized at construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "proto/shm/layout.h"

namespace moecached {

enum class GpuLogOutcome : std::uint8_t {
  kNone,  // not logged: the ring was full, or nothing to tell
  kEntry,
  kRefused,  // out of range
};

class GpuLogReader {
 public:
  struct Row {
    LayerIndex layer;
    bool by_expert = false;  // the row holds experts, read from host memory, and no slots
  };

  // geometry: its log_* words, as the daemon wrote them.
  GpuLogReader(const moecached_shm_gpu& geometry, std::uint32_t n_layers, std::uint32_t n_expert_used);

  // log: of one lane. What the functions below return is valid after kEntry, until the next call.
  [[nodiscard]] GpuLogOutcome read(std::span<const std::byte> log, std::uint64_t epoch);

  [[nodiscard]] std::uint32_t n_tokens() const { return n_tokens_; }  // 1..MOECACHED_LOG_TOKENS
  [[nodiscard]] bool prefill() const { return prefill_; }
  // Layers of which no row was written: they say that everything was resident.
  [[nodiscard]] std::span<const LayerIndex> whole() const { return whole_; }
  [[nodiscard]] std::span<const Row> rows() const { return rows_; }
  // n_expert_used of them, any number.
  [[nodiscard]] std::span<const std::int32_t> slots(std::size_t row, std::uint32_t token) const {
    return std::span(slots_).subspan((row * n_tokens_ + token) * k_, k_);
  }

 private:
  const std::uint32_t entries_, entry_bytes_, slots_offset_, layer_bytes_;
  const std::uint32_t n_layers_, k_;
  std::uint32_t n_tokens_ = 0;
  bool prefill_ = false;
  std::vector<LayerIndex> whole_;
  std::vector<Row> rows_;
  std::vector<std::int32_t> slots_;
};

}  // namespace moecached
