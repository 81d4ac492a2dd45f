// Monotonic time in nanoseconds, for latencies and timeouts; never for dates. Thread: any.
#pragma once

#include <ctime>

#include <cstdint>

namespace moecached {

[[nodiscard]] inline std::uint64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace moecached
