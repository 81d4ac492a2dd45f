#include "shim/ggml/load_hook.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "shim/ggml/gguf_index.h"
#include "shim/ggml/got_patch.h"
#include "shim/ggml/log.h"
#include "shim/ggml/mapped_ranges.h"

namespace moecached::shim {
namespace {

struct Hook {
  std::mutex mutex;
  MappedRanges ranges;
  // Every munmap of the host passes by: it must not lock while there is nothing to look up.
  std::atomic<bool> any{false};
};

Hook& hook() {
  static Hook* instance = new Hook;  // never destroyed: the host unmaps during its own exit
  return *instance;
}

uintptr_t page_mask() {
  static const auto mask = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1;
  return mask;
}

// Whole pages around a range, for calls that take nothing else. At its edges a few bytes of a neighbour come
// along.
ByteRange page_aligned(const ByteRange& range) {
  return {range.begin & ~page_mask(), (range.end + page_mask()) & ~page_mask()};
}

std::vector<ByteRange> wanted_in(const void* address, std::size_t bytes, bool& known) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  Hook& state = hook();
  if (!state.any.load(std::memory_order_acquire)) {
    known = false;
    return {};
  }
  const std::lock_guard lock(state.mutex);
  known = state.ranges.covers(begin, bytes);
  return known ? state.ranges.wanted_in(begin, bytes) : std::vector<ByteRange>();
}

void forget(const void* address, std::size_t bytes) {
  Hook& state = hook();
  if (!state.any.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state.mutex);
  state.ranges.remove(reinterpret_cast<uintptr_t>(address), (bytes + page_mask()) & ~page_mask());
  state.any.store(!state.ranges.empty(), std::memory_order_release);
}

void remember(void* address, std::size_t bytes, uint64_t offset, const GgufIndex& index,
              uint64_t file_bytes) {
  Hook& state = hook();
  auto wanted = std::make_shared<const std::vector<ByteRange>>(index.ranges_without_experts(file_bytes));
  const std::lock_guard lock(state.mutex);
  // The kernel maps whole pages, and --mlock asks for whole pages.
  const std::size_t mapped = (bytes + page_mask()) & ~page_mask();
  state.ranges.add(reinterpret_cast<uintptr_t>(address), mapped, offset, std::move(wanted));
  state.any.store(true, std::memory_order_release);
}

void* hooked_mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  std::shared_ptr<const GgufIndex> index;
  if (fd >= 0 && (flags & MAP_ANONYMOUS) == 0) index = gguf_index_of(fd);
  if (index == nullptr || !index->has_experts()) {
    void* mapped = mmap(address, bytes, protection, flags, fd, offset);
    if (mapped != MAP_FAILED) forget(mapped, bytes);
    return mapped;
  }
  void* mapped = mmap(address, bytes, protection, flags & ~MAP_POPULATE, fd, offset);
  if (mapped == MAP_FAILED) return mapped;
  struct stat status;
  const uint64_t file_bytes = fstat(fd, &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
  remember(mapped, bytes, static_cast<uint64_t>(offset), *index, file_bytes);
  debug("a mapping of %zu bytes of a model is not populated, its experts are left on disk", bytes);
  if ((flags & MAP_POPULATE) != 0) {
    bool known = false;
    for (const ByteRange& range : wanted_in(mapped, bytes, known)) {
      const ByteRange pages = page_aligned(range);
      madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_WILLNEED);
    }
  }
  return mapped;
}

int hooked_munmap(void* address, std::size_t bytes) {
  // Before the call: afterwards another thread may have got the same addresses.
  forget(address, bytes);
  return munmap(address, bytes);
}

int hooked_posix_madvise(void* address, std::size_t bytes, int advice) {
  bool known = false;
  const std::vector<ByteRange> wanted =
      advice == POSIX_MADV_WILLNEED ? wanted_in(address, bytes, known) : std::vector<ByteRange>();
  if (!known) return posix_madvise(address, bytes, advice);
  for (const ByteRange& range : wanted) {
    const ByteRange pages = page_aligned(range);
    const int error = posix_madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, advice);
    if (error != 0) return error;
  }
  return 0;
}

int hooked_mlock(const void* address, std::size_t bytes) {
  bool known = false;
  const std::vector<ByteRange> wanted = wanted_in(address, bytes, known);
  if (!known) return mlock(address, bytes);
  for (const ByteRange& range : wanted) {
    if (mlock(reinterpret_cast<const void*>(range.begin), range.end - range.begin) != 0) return -1;
  }
  return 0;
}

}  // namespace

bool install_load_hook() {
  const std::array<Replacement, 5> replacements = {{
      {"mmap", reinterpret_cast<void*>(hooked_mmap)},
      {"mmap64", reinterpret_cast<void*>(hooked_mmap)},  // off_t has 64 bits on the platforms we build for
      {"munmap", reinterpret_cast<void*>(hooked_munmap)},
      {"posix_madvise", reinterpret_cast<void*>(hooked_posix_madvise)},
      {"mlock", reinterpret_cast<void*>(hooked_mlock)},
  }};
  const bool can_map = patch_imports(std::span(replacements).first(2)) > 0;
  patch_imports(std::span(replacements).subspan(2));
  return can_map;
}

void release_mapped(const void* data, unsigned long bytes) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page_mask()) & ~page_mask();
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~page_mask();
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace moecached::shim
