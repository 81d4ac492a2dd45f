#include "daemon/tier/staging.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/platform/huge_pages.h"

namespace moecached {

Result<Staging> Staging::create(std::uint32_t n_buffers, std::uint64_t buffer_bytes) {
  // Aligned to huge pages: before Linux 6.7 the kernel aligns no anonymous mapping for us.
  const std::uint64_t wanted = n_buffers * buffer_bytes;
  const std::uint64_t bytes = wanted + kHugePageBytes;
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED)
    return system_fault("mmap of " + std::to_string(bytes) + " bytes of staging memory", errno);
  ::madvise(address, bytes, MADV_HUGEPAGE);
  Staging staging;
  staging.mapping_ = {static_cast<std::byte*>(address), bytes};
  const std::uint64_t skipped = -reinterpret_cast<std::uintptr_t>(address) & (kHugePageBytes - 1);
  staging.memory_ = staging.mapping_.subspan(skipped, wanted);
  staging.free_.reserve(n_buffers);
  for (std::uint32_t i = n_buffers; i-- > 0;)
    staging.free_.push_back(staging.memory_.data() + i * buffer_bytes);
  return staging;
}

Staging::Staging(Staging&& other) noexcept
    : mapping_(std::exchange(other.mapping_, {})),
      memory_(std::exchange(other.memory_, {})),
      free_(std::move(other.free_)) {}

Staging& Staging::operator=(Staging&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(memory_, other.memory_);
  std::swap(free_, other.free_);
  return *this;
}

Staging::~Staging() {
  if (!mapping_.empty()) ::munmap(mapping_.data(), mapping_.size());
}

std::byte* Staging::take() {
  CHECK(!free_.empty());
  std::byte* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

}  // namespace moecached
