// One independent statement of what a sound layout is, for tests and fuzz targets.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "daemon/model/model_layout.h"

namespace moecached::test {

// Empty, or the first thing wrong. Written against the contract in model_layout.h, with 128-bit arithmetic.
std::string unsound(const ModelLayout& layout, std::span<const std::uint64_t> file_bytes,
                    std::uint32_t direct_alignment);

}  // namespace moecached::test
