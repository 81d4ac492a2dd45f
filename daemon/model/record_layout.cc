#include "daemon/model/record_layout.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/base/text.h"
#include "daemon/model/checked_math.h"

namespace moecached {
namespace {

Fault too_large(const PartLayout& part) {
  return Fault{FaultCode::kInvalid, "tensor " + in_quotes(part.name) + " makes a slot of 2^64 bytes or more"};
}

}  // namespace

Result<std::uint64_t> lay_out_record(std::span<PartLayout> parts, std::uint32_t direct_alignment) {
  CHECK(direct_alignment == 0 || is_power_of_two(direct_alignment));
  std::uint64_t cursor = 0;
  std::uint64_t stride_alignment = kCacheLineBytes;
  for (PartLayout& part : parts) {
    CHECK(part.expert_bytes > 0);
    part.direct = direct_alignment != 0 && part.expert_bytes % direct_alignment == 0;
    for (PartExtent& extent : part.extents)
      extent.direct = part.direct && (extent.offset ^ part.file_offset) % direct_alignment == 0;
    if (!part.direct) continue;
    stride_alignment = std::max<std::uint64_t>(kCacheLineBytes, direct_alignment);
    const std::uint64_t phase = part.file_offset % direct_alignment;
    std::uint64_t end = 0;  // cursor is a multiple of the alignment here
    if (!checked_add(cursor, phase, part.slot_offset) ||
        !checked_add(part.slot_offset, part.expert_bytes, end) ||
        !checked_align_up(end, direct_alignment, cursor)) {
      return too_large(part);
    }
  }
  for (PartLayout& part : parts) {
    if (part.direct) continue;
    if (!checked_align_up(cursor, kCacheLineBytes, part.slot_offset) ||
        !checked_add(part.slot_offset, part.expert_bytes, cursor)) {
      return too_large(part);
    }
  }
  std::uint64_t stride = 0;
  if (!checked_align_up(cursor, stride_alignment, stride)) return too_large(parts.back());
  return stride;
}

}  // namespace moecached
