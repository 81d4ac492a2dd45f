// Sizes as people write them. Units are 1024-based with or without the i ("4GiB", "4G"), 1000-based with a
// plain B
// ("1.5GB"); no unit is bytes; "25%" is a share of `whole_bytes`. Case does not matter. Pure. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/base/result.h"

namespace moecached {

// kInvalid: not a size, negative, more than 100%, or too large for 64 bits. The text does not repeat the
// input.
[[nodiscard]] Result<std::uint64_t> parse_size(std::string_view text, std::uint64_t whole_bytes);
// The largest unit that divides it, exactly: "4GiB", "1536MiB", "1000". Parses back to the same number.
[[nodiscard]] std::string format_size(std::uint64_t bytes);

}  // namespace moecached
