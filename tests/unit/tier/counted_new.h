// Replaces the program's operator new by one that counts.
#pragma once

#include <cstdint>

namespace moecached {

[[nodiscard]] std::uint64_t n_allocations() noexcept;  // so far, on all threads

}  // namespace moecached
