// Huge pages for shared memory, extent by extent, as it comes to be used. Direct I/O cares: a block in 4 KiB
// pages is 256 segments a MiB for the disk driver, in huge pages it is one or two; so do the TLB misses of
// who computes on it. shmem_enabled is "never" nearly everywhere; MADV_COLLAPSE (Linux 6.1) works regardless
// of it. Thread: any, one at a time for each instance. Memory: a bit an extent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moecached {

inline constexpr std::uint64_t kHugePageBytes = 2u << 20;

class HugePages {
 public:
  // memory: a shared mapping, or part of one; extents that it holds wholly are taken care of. Those of a
  // memfd's mapping are congruent with the file's (Mapping::map), without which the kernel refuses.
  explicit HugePages(std::span<std::byte> memory);

  // Something is about to be written to these bytes. The first time that an extent is touched it becomes one
  // huge page, if the kernel can; which populates it, so that memory grows by 2 MiB a time.
  // Returns why the rest is left in small pages when that was just decided, otherwise nothing.
  [[nodiscard]] std::string prepare(const std::byte* begin, std::uint64_t n_bytes) {
    return prepare(begin, n_bytes, {first_, prepared_.size() * kHugePageBytes});
  }
  // The same, for extents that lie within `whole` alone: memory that comes and goes at once.
  [[nodiscard]] std::string prepare(const std::byte* begin, std::uint64_t n_bytes,
                                    std::span<std::byte> whole);
  // The memory of these bytes was given back: their extents count as untouched.
  void forget(std::span<const std::byte> released);

 private:
  std::byte* first_ = nullptr;  // extent
  std::vector<bool> prepared_;
  std::uint32_t n_failures_ = 0;
};

}  // namespace moecached
