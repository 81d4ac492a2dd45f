#include "daemon/platform/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <string>

#include "daemon/platform/huge_pages.h"
#include "daemon/platform/memory_info.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3; a kernel that knows it logs a warning about callers that do not
#endif

namespace moecached {
namespace {

std::string what_was_asked(std::string_view label, std::uint64_t bytes) {
  return "shared memory \"" + std::string(label) + "\" of " + bytes_for_people(bytes);
}

// Says what usually refuses, because "Cannot allocate memory" alone leaves people looking at free memory.
Fault refused(std::string_view call, std::uint64_t bytes, int error_number) {
  Fault fault = system_fault(std::string(call) + " of " + bytes_for_people(bytes), error_number);
  if (error_number == ENOMEM || error_number == ENOSPC || error_number == EFBIG) {
    fault.code = FaultCode::kLimit;
    fault.text +=
        "; ask for less, or raise what limits it: the memory cgroup, vm.overcommit_memory, "
        "or this process' RLIMIT_AS and RLIMIT_FSIZE";
  }
  return fault;
}

// Where a mapping of so many bytes starts with a huge page: the kernel looks for such a place by itself only
// when it means to use huge pages. Reserved, and to be mapped over; null: anywhere.
void* reserve_aligned(std::uint64_t bytes) {
  if (bytes < kHugePageBytes) return nullptr;
  const std::uint64_t wanted = bytes + kHugePageBytes;
  void* const reserved =
      ::mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const std::uint64_t skipped = -reinterpret_cast<std::uintptr_t>(begin) & (kHugePageBytes - 1);
  const std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t end = skipped + (bytes + page - 1) / page * page;
  if (skipped > 0) ::munmap(begin, skipped);
  if (end < wanted) ::munmap(begin + end, wanted - end);
  return begin + skipped;
}

Result<UniqueFd> make_memfd(const std::string& name) {
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return system_fault("memfd_create", errno);
  return fd;
}

// Another description of the same file. The mode keeps those who receive it from opening it once more.
Result<UniqueFd> reopen_for_reading(int fd) {
  if (::fchmod(fd, 0400) != 0) return system_fault("fchmod", errno);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reader) return system_fault("opening " + path + " for reading (is /proc mounted?)", errno);
  return reader;
}

}  // namespace

Result<Mapping> Mapping::map(int fd, std::uint64_t bytes, ClientAccess access) {
  const int protection = access == ClientAccess::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const place = reserve_aligned(bytes);
  void* const address =
      ::mmap(place, bytes, protection, MAP_SHARED | (place != nullptr ? MAP_FIXED : 0), fd, 0);
  if (address == MAP_FAILED) {
    const int error_number = errno;
    if (place != nullptr) ::munmap(place, bytes);
    return refused("mmap", bytes, error_number);
  }
  return Mapping(std::span<std::byte>(static_cast<std::byte*>(address), bytes));
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

void Mapping::reset() noexcept {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  bytes_ = {};
}

Result<Memfd> Memfd::create(std::string_view label, std::uint64_t bytes, ClientAccess access) {
  if (bytes == 0)
    return Fault{FaultCode::kInvalid, "shared memory \"" + std::string(label) + "\" of 0 bytes"};
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    return Fault{FaultCode::kLimit, what_was_asked(label, bytes) + " is more than a file can have"};
  }
  constexpr std::size_t kNameMax = 200;  // the kernel's limit is 249 with its own prefix
  Result<UniqueFd> made = make_memfd("moecached-" + std::string(label.substr(0, kNameMax)));
  if (!made) return std::move(made).error().with_context(what_was_asked(label, bytes));
  UniqueFd fd = std::move(made).value();
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return refused("ftruncate", bytes, errno).with_context(what_was_asked(label, bytes));
  }
  Result<Mapping> mapping = Mapping::map(fd.get(), bytes, ClientAccess::kReadWrite);
  if (!mapping) return std::move(mapping).error().with_context(what_was_asked(label, bytes));
  Memfd memory(std::move(fd), std::move(mapping).value());

  // One call: F_SEAL_SEAL closes the set. FUTURE_WRITE leaves the mapping made above alone (Linux 5.1).
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (access == ClientAccess::kReadOnly) seals |= F_SEAL_FUTURE_WRITE;
  if (::fcntl(memory.fd(), F_ADD_SEALS, seals) != 0) {
    return system_fault("sealing " + what_was_asked(label, bytes) + " (needs Linux 5.1)", errno);
  }
  if (access == ClientAccess::kReadOnlyReleasable) {
    Result<UniqueFd> reader = reopen_for_reading(memory.fd());
    if (!reader) return std::move(reader).error().with_context(what_was_asked(label, bytes));
    memory.fd_ = std::move(reader).value();
  }
  if (access != ClientAccess::kReadWrite && Mapping::map(memory.fd(), bytes, ClientAccess::kReadWrite)) {
    return Fault{
        FaultCode::kUnsupported,
        what_was_asked(label, bytes) + " can still be mapped writable by those who get it: " +
            (access == ClientAccess::kReadOnly ? "this kernel does not honour F_SEAL_FUTURE_WRITE"
                                               : "a descriptor for reading does not keep from it here")};
  }
  return memory;
}

Status Memfd::read(std::uint64_t offset, std::span<std::byte> destination) const {
  while (!destination.empty()) {
    const ssize_t n = ::pread(fd_.get(), destination.data(), destination.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return system_fault("pread of shared memory", errno);
    if (n == 0) return Fault{FaultCode::kInvalid, "read past the end of shared memory"};
    destination = destination.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return ok();
}

Status Memfd::release(std::uint64_t offset, std::uint64_t bytes) noexcept {
  // F_SEAL_FUTURE_WRITE would refuse it (EPERM), by the mapping as by the descriptor.
  const std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
  if (begin >= end) return ok();
  if (::madvise(mapping_.bytes().data() + begin, end - begin, MADV_REMOVE) != 0)
    return system_fault("madvise(MADV_REMOVE) of " + bytes_for_people(end - begin), errno);
  return ok();
}

std::uint64_t Memfd::bytes_backed() const noexcept {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) return 0;
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

}  // namespace moecached
