#include "daemon/platform/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "daemon/base/result.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; glibc 2.37
#endif

namespace moecached {
namespace {

// Each may have cost the kernel a search for free memory in one piece. EINVAL is its answer for good.
constexpr std::uint32_t kFailuresMax = 16;

bool collapse(std::byte* extent) {
  // The kernel collapses no extent that is quite empty. A load is enough to make a page, and other than a
  // store it cannot meet what a disk is writing there.
  (void)*static_cast<volatile std::byte*>(extent);
  return ::madvise(extent, kHugePageBytes, MADV_COLLAPSE) == 0;
}

}  // namespace

HugePages::HugePages(std::span<std::byte> memory) {
  const std::uint64_t skipped = -reinterpret_cast<std::uintptr_t>(memory.data()) & (kHugePageBytes - 1);
  if (memory.size() < skipped) return;
  first_ = memory.data() + skipped;
  prepared_.resize((memory.size() - skipped) / kHugePageBytes, false);
}

std::string HugePages::prepare(const std::byte* begin, std::uint64_t n_bytes, std::span<std::byte> whole) {
  if (prepared_.empty() || n_bytes == 0 || n_failures_ >= kFailuresMax) return {};
  const std::uint64_t from = begin > first_ ? static_cast<std::uint64_t>(begin - first_) : 0;
  const std::byte* const end = begin + n_bytes;
  const std::uint64_t to = end > first_ ? static_cast<std::uint64_t>(end - first_) : 0;
  const std::uint64_t last =
      std::min<std::uint64_t>((to + kHugePageBytes - 1) / kHugePageBytes, prepared_.size());
  for (std::uint64_t i = from / kHugePageBytes; i < last; ++i) {
    std::byte* const extent = first_ + i * kHugePageBytes;
    if (prepared_[i] || extent < whole.data() || extent + kHugePageBytes > whole.data() + whole.size())
      continue;
    prepared_[i] = true;
    if (collapse(extent)) continue;
    const int error_number = errno;
    n_failures_ = error_number == EINVAL ? kFailuresMax : n_failures_ + 1;
    if (n_failures_ < kFailuresMax) continue;
    return system_fault("small pages: madvise(MADV_COLLAPSE)", error_number).text +
           (error_number == EINVAL ? " (needs Linux 6.1 with transparent huge pages)" : "");
  }
  return {};
}

void HugePages::forget(std::span<const std::byte> released) {
  const std::byte* const end = released.data() + released.size();
  if (prepared_.empty() || end <= first_) return;
  const std::byte* const begin = std::max<const std::byte*>(released.data(), first_);
  const auto from = static_cast<std::uint64_t>(begin - first_), to = static_cast<std::uint64_t>(end - first_);
  for (std::uint64_t i = (from + kHugePageBytes - 1) / kHugePageBytes;
       i < std::min<std::uint64_t>(to / kHugePageBytes, prepared_.size()); ++i)
    prepared_[i] = false;
}

}  // namespace moecached
