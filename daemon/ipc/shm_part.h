// Parts of layers as the model segments describe them. Pure. Thread: any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include "daemon/model/model_layout.h"
#include "proto/shm/layout.h"

namespace moecached {

// Zero-terminated, cut at the array's end.
inline void copy_name(std::span<char> to, std::string_view from) {
  const std::size_t n = std::min(from.size(), to.size() - 1);
  std::memcpy(to.data(), from.data(), n);
  to[n] = '\0';
}

inline std::size_t count_parts(const ModelLayout& layout) {
  std::size_t n = 0;
  for (const LayerLayout& layer : layout.layers) n += layer.parts.size();
  return n;
}

inline std::size_t count_extents(const ModelLayout& layout) {
  std::size_t n = 0;
  for (const LayerLayout& layer : layout.layers) {
    for (const PartLayout& part : layer.parts) n += part.extents.size();
  }
  return n;
}

// Writes all parts of a layout, and behind them their extents, to where there is room for them.
class PartWriter {
 public:
  PartWriter(moecached_shm_part* parts, const ModelLayout& layout)
      : parts_(parts), extents_(reinterpret_cast<moecached_shm_extent*>(parts + count_parts(layout))) {}

  // slot_offset: 0 where parts have windows of their own.
  void write(const PartLayout& from, std::uint64_t slot_offset) {
    moecached_shm_part& to = parts_[n_parts_++];
    to.kind = from.kind;
    to.ggml_type = from.ggml_type;
    to.first_extent = from.extents.empty() ? 0 : 1 + n_extents_;
    const PartExtent first = from.extent(0);
    to.file = first.file;
    to.file_offset = first.offset;
    to.ne0 = from.ne0;
    to.ne1 = from.ne1;
    to.expert_bytes = from.expert_bytes;
    to.slot_offset = slot_offset;
    copy_name(to.name, from.name);
    for (const PartExtent& extent : from.extents)
      extents_[n_extents_++] = {.file = extent.file, .reserved0 = 0, .offset = extent.offset};
  }
  [[nodiscard]] std::uint32_t n_parts() const { return n_parts_; }
  [[nodiscard]] std::uint32_t n_extents() const { return n_extents_; }
  [[nodiscard]] std::byte* end() const { return reinterpret_cast<std::byte*>(extents_ + n_extents_); }

 private:
  moecached_shm_part* parts_;
  moecached_shm_extent* extents_;
  std::uint32_t n_parts_ = 0, n_extents_ = 0;
};

}  // namespace moecached
