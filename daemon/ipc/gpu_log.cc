#include "daemon/ipc/gpu_log.h"

#include <cstring>

#include "daemon/base/check.h"

namespace moecached {

GpuLogReader::GpuLogReader(const moecached_shm_gpu& geometry, std::uint32_t n_layers,
                           std::uint32_t n_expert_used)
    : entries_(geometry.log_entries),
      entry_bytes_(geometry.log_entry_bytes),
      slots_offset_(geometry.log_slots_offset),
      layer_bytes_(geometry.log_layer_bytes),
      n_layers_(n_layers),
      k_(n_expert_used),
      slots_(std::size_t{n_layers} * MOECACHED_LOG_TOKENS * n_expert_used) {
  CHECK(sizeof(moecached_shm_log_entry) + std::uint64_t{n_layers} * sizeof(std::uint16_t) <= slots_offset_);
  CHECK(std::uint64_t{k_} * MOECACHED_LOG_TOKENS * sizeof(std::int32_t) <= layer_bytes_);
  CHECK(slots_offset_ + std::uint64_t{n_layers} * layer_bytes_ <= entry_bytes_);
  whole_.reserve(n_layers);
  rows_.reserve(n_layers);
}

GpuLogOutcome GpuLogReader::read(std::span<const std::byte> log, std::uint64_t epoch) {
  CHECK(std::uint64_t{entries_} * entry_bytes_ <= log.size());
  const std::byte* const at = log.data() + (epoch % entries_) * entry_bytes_;
  moecached_shm_log_entry header;
  std::memcpy(&header, at, sizeof header);
  if (header.epoch != epoch) return GpuLogOutcome::kNone;
  if (header.n_whole > n_layers_ || header.n_layers > n_layers_ - header.n_whole ||
      header.n_layers + header.n_whole == 0 || header.n_tokens == 0 ||
      header.n_tokens > MOECACHED_LOG_TOKENS) {
    return GpuLogOutcome::kRefused;
  }
  n_tokens_ = header.n_tokens;
  prefill_ = (header.flags & MOECACHED_FLAG_PREFILL) != 0;
  whole_.clear();
  rows_.clear();
  for (std::uint32_t i = 0; i < header.n_layers + header.n_whole; ++i) {
    std::uint16_t word = 0;
    std::memcpy(&word, at + sizeof header + i * sizeof word, sizeof word);
    const bool has_row = i < header.n_layers;
    const bool by_expert = has_row && (word & MOECACHED_LOG_BY_EXPERT) != 0;
    const auto index = static_cast<std::uint16_t>(by_expert ? word & ~MOECACHED_LOG_BY_EXPERT : word);
    if (index >= n_layers_) return GpuLogOutcome::kRefused;
    if (has_row) {
      rows_.push_back({LayerIndex(index), by_expert});
    } else {
      whole_.push_back(LayerIndex(index));
    }
  }
  const std::size_t row_words = std::size_t{n_tokens_} * k_;
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    std::memcpy(slots_.data() + row * row_words, at + slots_offset_ + row * layer_bytes_,
                row_words * sizeof(std::int32_t));
  }
  return GpuLogOutcome::kEntry;
}

}  // namespace moecached
