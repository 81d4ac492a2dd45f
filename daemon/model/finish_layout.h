// The last step from a model's files to its layout, whatever files they are: records, slot classes, sums.
// Pure. Thread: any.
#pragma once

#include <cstdint>

#include "daemon/base/result.h"
#include "daemon/model/model_layout.h"

namespace moecached {

// Sets slot_offset, direct, slot_stride and slot_class of every layer and expert_bytes_total, from parts
// whose sizes and places are known. direct_alignment: 0 or a power of two.
[[nodiscard]] Status finish_layout(ModelLayout& layout, std::uint32_t direct_alignment);

}  // namespace moecached
