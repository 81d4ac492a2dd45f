// A part of a layer as the model segments describe it. Pure. Thread: any.
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

// slot_offset: 0 where parts have windows of their own.
inline void describe_part(const PartLayout& from, std::uint64_t slot_offset, moecached_shm_part* to) {
  to->kind = from.kind;
  to->ggml_type = from.ggml_type;
  to->file = from.file;
  to->ne0 = from.ne0;
  to->ne1 = from.ne1;
  to->file_offset = from.file_offset;
  to->expert_bytes = from.expert_bytes;
  to->slot_offset = slot_offset;
  copy_name(to->name, from.name);
}

}  // namespace moecached
