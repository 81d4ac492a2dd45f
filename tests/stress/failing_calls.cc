#include "tests/stress/failing_calls.h"

#include <dlfcn.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace moecached::test {
namespace {

std::atomic<CallKind> g_kind{CallKind::kNone};
std::atomic<std::uint64_t> g_k, g_seen, g_failed;
std::atomic<bool> g_each, g_spoils;

// Found before main: looking them up allocates.
template <typename Function>
Function* next(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function*>(found);
}
const auto real_pread = next<ssize_t(int, void*, size_t, off_t)>("pread");
const auto real_memfd_create = next<int(const char*, unsigned)>("memfd_create");
const auto real_ftruncate = next<int(int, off_t)>("ftruncate");
const auto real_mmap = next<void*(void*, size_t, int, int, int, off_t)>("mmap");
const auto real_submit_and_wait = next<int(io_uring*, unsigned)>("io_uring_submit_and_wait");
const auto real_submit_and_get_events = next<int(io_uring*)>("io_uring_submit_and_get_events");

// Whether this call is to fail; n_failed: how many did before it.
bool is_due(CallKind kind, std::uint64_t* n_failed = nullptr) {
  if (g_kind.load(std::memory_order_relaxed) != kind) return false;
  const std::uint64_t n = g_seen.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t k = g_k.load(std::memory_order_relaxed);
  if (g_each.load(std::memory_order_relaxed) ? n % k != 0 : n != k) return false;
  const std::uint64_t before = g_failed.fetch_add(1, std::memory_order_relaxed);
  if (n_failed != nullptr) *n_failed = before;
  return true;
}

// Half of the bytes is an answer that a kernel may give at any time, and not an error.
bool is_short(std::uint64_t n_failed) { return (g_k.load(std::memory_order_relaxed) + n_failed) % 3 == 0; }

void fail_completions(io_uring* ring) {
  static std::atomic<unsigned> looked{0};  // one ring a process
  const unsigned tail = io_uring_smp_load_acquire(ring->cq.ktail);
  for (unsigned at = looked; at != tail; ++at) {
    io_uring_cqe& entry = ring->cq.cqes[at & ring->cq.ring_mask];
    std::uint64_t n = 0;
    // The engine's own wake-up is no read of a file.
    if (entry.user_data == ~std::uint64_t{0} || entry.res <= 0 || !is_due(CallKind::kUring, &n)) continue;
    entry.res = is_short(n) && entry.res >= 8192 ? entry.res / 2 / 4096 * 4096 : -EIO;
  }
  looked = tail;
}

}  // namespace

void arm(const FailingCalls& calls) {
  g_k = calls.k;
  g_each = calls.each;
  g_spoils = calls.spoils;
  g_seen = 0;
  g_failed = 0;
  g_kind = calls.kind;
}
void disarm() { g_kind = CallKind::kNone; }
std::uint64_t calls_seen() { return g_seen; }
std::uint64_t calls_failed() { return g_failed; }

namespace {
void* allocate(std::size_t bytes, std::size_t alignment) {
  if (is_due(CallKind::kNew)) return nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

}  // namespace moecached::test

using moecached::test::CallKind;
using moecached::test::is_due;

extern "C" {

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  std::uint64_t n = 0;
  if (!is_due(CallKind::kPread, &n)) return moecached::test::real_pread(fd, to, bytes, offset);
  if (moecached::test::g_spoils) {
    const ssize_t got = moecached::test::real_pread(fd, to, bytes, offset);
    if (got > 0) static_cast<unsigned char*>(to)[got / 2] ^= 1;
    return got;
  }
  if (moecached::test::is_short(n) && bytes >= 2)
    return moecached::test::real_pread(fd, to, bytes / 2, offset);
  errno = EIO;
  return -1;
}

int memfd_create(const char* name, unsigned flags) noexcept {
  if (!is_due(CallKind::kMap)) return moecached::test::real_memfd_create(name, flags);
  errno = EMFILE;
  return -1;
}

int ftruncate(int fd, off_t bytes) noexcept {
  if (!is_due(CallKind::kMap)) return moecached::test::real_ftruncate(fd, bytes);
  errno = ENOSPC;
  return -1;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (!is_due(CallKind::kMap)) return moecached::test::real_mmap(at, bytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

int io_uring_submit_and_wait(io_uring* ring, unsigned n) {
  const int result = moecached::test::real_submit_and_wait(ring, n);
  moecached::test::fail_completions(ring);
  return result;
}

int io_uring_submit_and_get_events(io_uring* ring) {
  const int result = moecached::test::real_submit_and_get_events(ring);
  moecached::test::fail_completions(ring);
  return result;
}

}  // extern "C"

void* operator new(std::size_t bytes) { return moecached::test::allocate_or_throw(bytes, 0); }
void* operator new[](std::size_t bytes) { return moecached::test::allocate_or_throw(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return moecached::test::allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return moecached::test::allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return moecached::test::allocate(bytes, 0);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return moecached::test::allocate(bytes, 0);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
