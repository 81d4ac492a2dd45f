// Where the parts of one expert lie in a slot record. Direct parts first, each alone in the whole blocks that
// a direct read of it touches, then the others packed at cache lines:
//
//   | A |###A###|###A###|#  | A |###A###|###A###|###A###|64|64|..|      A = direct_alignment, # = bytes of a
//   part ^ region of part 0      ^ region of part 1          ^ copied parts
//
// A direct read starts and ends at multiples of A in the file. It can land in the record without a copy if
// the record has the same phase as the file (slot_offset = file_offset modulo A, for every expert:
// expert_bytes is a multiple of A), and then overwrites up to A - 1 bytes on either side. Of a part with
// extents the record takes the phase of expert 0, and those of another phase are copied.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/base/result.h"
#include "daemon/model/model_layout.h"

namespace moecached {

inline constexpr std::uint64_t kCacheLineBytes = 64;

// Sets slot_offset and direct of every part and extent, and returns the record's stride. REQUIRES: kind,
// file_offset and expert_bytes are set, expert_bytes > 0; direct_alignment is 0 or a power of two.
[[nodiscard]] Result<std::uint64_t> lay_out_record(std::span<PartLayout> parts,
                                                   std::uint32_t direct_alignment);

}  // namespace moecached
