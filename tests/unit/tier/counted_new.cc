// In a file of its own: inlined, the compiler takes malloc and operator delete for a mismatched pair.
#include "tests/unit/tier/counted_new.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> count{0};
}

void* operator new(std::size_t n_bytes) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(n_bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace moecached {

std::uint64_t n_allocations() noexcept { return count.load(); }

}  // namespace moecached
