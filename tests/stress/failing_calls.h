// Calls of this process that fail on purpose: of one kind, the k-th, or each k-th. Linking failing_calls.cc
// puts its functions in the place of libc's, liburing's and the operators new. Thread: arm and disarm by one;
// the calls any.
#pragma once

#include <cstdint>

namespace moecached::test {

enum class CallKind : std::uint8_t {
  kNone,
  kPread,  // of files: an error, or half of the bytes
  kUring,  // completions of io_uring: the same
  kMap,    // memfd_create, ftruncate, mmap
  kNew,    // operator new
};

struct FailingCalls {
  CallKind kind = CallKind::kNone;
  std::uint64_t k = 0;
  bool each = false;  // each k-th, not the k-th alone
  bool spoils =
      false;  // nothing fails, but one byte of what was read is another: whoever compares must see it
};

void arm(const FailingCalls& calls);  // counts from 0
void disarm();
[[nodiscard]] std::uint64_t calls_seen();    // of the kind, since arm
[[nodiscard]] std::uint64_t calls_failed();  // of those

}  // namespace moecached::test
