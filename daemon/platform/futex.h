// Wait on and wake a 32-bit word that several processes map. Shared futexes, never FUTEX_PRIVATE: the kernel
// finds the waiters by page and offset, so the address may differ between processes. Thread: any.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace moecached {

enum class FutexWait : std::uint8_t {
  kWoken,    // or a spurious return: look at the word again
  kChanged,  // the word was not `expected`
  kTimedOut,
};

// Returns how many waiters were woken.
inline int futex_wake(const std::uint32_t* word, int n_waiters = INT_MAX) noexcept {
  const long woken = ::syscall(SYS_futex, word, FUTEX_WAKE, n_waiters, nullptr, nullptr, 0);
  return woken < 0 ? 0 : static_cast<int>(woken);
}

inline FutexWait futex_wait(const std::uint32_t* word, std::uint32_t expected,
                            std::uint64_t timeout_ns) noexcept {
  timespec timeout{};
  timeout.tv_sec = static_cast<std::time_t>(timeout_ns / 1'000'000'000u);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000u);
  if (::syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0) return FutexWait::kWoken;
  if (errno == EAGAIN) return FutexWait::kChanged;
  return errno == ETIMEDOUT ? FutexWait::kTimedOut : FutexWait::kWoken;  // EINTR: a spurious return
}

}  // namespace moecached
