// CHECK aborts in every build on a bug; DCHECK only in debug builds, for invariants that cost.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace moecached {
[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, condition);
  std::abort();
}
}  // namespace moecached

#define CHECK(condition) \
  (__builtin_expect(!!(condition), 1) ? (void)0 : ::moecached::check_failed(#condition, __FILE__, __LINE__))
#ifdef NDEBUG
#define DCHECK(condition) ((void)0)
#else
#define DCHECK(condition) CHECK(condition)
#endif
