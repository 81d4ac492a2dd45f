// Arithmetic on sizes and offsets that come out of a file: false instead of a wrap. `out` is written only on
// true.
#pragma once

#include <cstdint>

namespace moecached {

[[nodiscard]] inline bool checked_add(std::uint64_t a, std::uint64_t b, std::uint64_t& out) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return false;
  out = sum;
  return true;
}

[[nodiscard]] inline bool checked_multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& out) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return false;
  out = product;
  return true;
}

[[nodiscard]] inline bool is_power_of_two(std::uint64_t value) {
  return value != 0 && (value & (value - 1)) == 0;
}

// REQUIRES: alignment is a power of two.
[[nodiscard]] inline bool checked_align_up(std::uint64_t value, std::uint64_t alignment, std::uint64_t& out) {
  std::uint64_t bumped = 0;
  if (!checked_add(value, alignment - 1, bumped)) return false;
  out = bumped & ~(alignment - 1);
  return true;
}

}  // namespace moecached
