#include "daemon/platform/file.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>

namespace moecached {
namespace {

constexpr std::uint32_t kFallbackAlignment =
    4096;  // what every file system that has O_DIRECT accepts in practice

Result<FileIdentity> identity_of_regular(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_fault("fstat", errno);
  if (!S_ISREG(status.st_mode)) return Fault{FaultCode::kInvalid, "the descriptor is not of a regular file"};
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return system_fault("F_GETFL", errno);
  if ((flags & O_PATH) != 0 || (flags & O_ACCMODE) == O_WRONLY) {
    return Fault{FaultCode::kInvalid, "the file is not open for reading"};
  }
  return file_identity(fd);
}

// Empty when refused, with errno set: /proc is not there, or our user may not open the file itself.
UniqueFd reopen(int fd, int flags, const FileIdentity& identity) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd again(::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
  if (!again) return again;
  const Result<FileIdentity> seen = file_identity(again.get());
  if (seen && seen->device == identity.device && seen->inode == identity.inode) return again;
  errno = ESTALE;
  return UniqueFd();
}

// 0: the file system says that this file cannot be read directly.
std::uint32_t stated_alignment(int fd) {
  struct statx status {};
  // Called by number: the C library's wrapper is free to ask for less than it is told.
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return kFallbackAlignment;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return kFallbackAlignment;
  if (status.stx_dio_offset_align == 0) return 0;
  const std::uint32_t alignment = std::max(status.stx_dio_mem_align, status.stx_dio_offset_align);
  return std::has_single_bit(alignment) ? alignment : 0;
}

// Some file systems accept the flag and refuse the reads. Returns 0 or an errno.
int try_direct_read(int fd, std::uint32_t alignment, std::uint64_t file_bytes) {
  if (file_bytes == 0) return 0;
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(alignment, alignment),
                                                          &std::free);
  if (block == nullptr) return ENOMEM;
  while (::pread(fd, block.get(), alignment, 0) < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::string because(const std::string& what, int error_number) {
  return system_fault(what, error_number).text;
}

// Fills fd, alignment or reason.
void make_direct(ReadableFile& file, int given, std::uint32_t alignment_max) {
  std::uint32_t alignment = stated_alignment(given);
  if (alignment == 0) {
    file.reason = "the file system does not offer O_DIRECT for this file";
    return;
  }
  if (alignment > alignment_max) {
    file.reason = "O_DIRECT takes blocks of " + std::to_string(alignment) +
                  " bytes here, and reads may have " + std::to_string(alignment_max);
    return;
  }
  UniqueFd direct = reopen(given, O_DIRECT, file.identity);
  if (!direct && errno == EINVAL) {
    file.reason = because("open with O_DIRECT", errno);
    return;
  }
  int changed_flags = -1;  // of the given description, to put back
  if (!direct) {
    const int flags = ::fcntl(given, F_GETFL);
    direct = UniqueFd(::fcntl(given, F_DUPFD_CLOEXEC, 0));
    if (flags < 0 || !direct || ::fcntl(given, F_SETFL, flags | O_DIRECT) != 0) {
      file.reason = because("O_DIRECT on a descriptor that cannot be opened anew", errno);
      return;
    }
    changed_flags = flags;
  }
  int refused = try_direct_read(direct.get(), alignment, file.identity.bytes);
  if (refused == EINVAL && alignment < kFallbackAlignment && kFallbackAlignment <= alignment_max) {
    alignment = kFallbackAlignment;
    refused = try_direct_read(direct.get(), alignment, file.identity.bytes);
  }
  if (refused == EINVAL || refused == EOPNOTSUPP) {
    if (changed_flags >= 0) ::fcntl(given, F_SETFL, changed_flags);
    file.reason = because("a read with O_DIRECT", refused);
    return;
  }
  // Any other error is the disk's, and will be met again and reported by the reads themselves.
  file.fd = std::move(direct);
  file.direct_alignment = alignment;
}

}  // namespace

Result<FileIdentity> file_identity(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_fault("fstat", errno);
  return FileIdentity{
      status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
      static_cast<std::int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

Result<ReadableFile> open_for_reading(UniqueFd fd, std::uint32_t direct_alignment_max) {
  Result<FileIdentity> identity = identity_of_regular(fd.get());
  if (!identity) return std::move(identity).error();
  ReadableFile file;
  file.identity = *identity;
  if (direct_alignment_max > 0) make_direct(file, fd.get(), direct_alignment_max);
  if (file.fd) return file;

  UniqueFd buffered = reopen(fd.get(), 0, file.identity);
  if (buffered) {
    // Reads are as large as they need to be; read-ahead would fetch experts that nobody asked for.
    ::posix_fadvise(buffered.get(), 0, 0, POSIX_FADV_RANDOM);
    file.fd = std::move(buffered);
    return file;
  }
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags >= 0 && (flags & O_DIRECT) != 0 && ::fcntl(fd.get(), F_SETFL, flags & ~O_DIRECT) != 0) {
    return system_fault("clear O_DIRECT", errno);  // reads of any offset and length would be refused
  }
  file.fd = std::move(fd);
  return file;
}

void drop_page_cache(int fd, std::uint64_t offset, std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kPage = 4096;
  const std::uint64_t begin = offset / kPage * kPage;
  const std::uint64_t end = (offset + bytes + kPage - 1) / kPage * kPage;
  ::posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
}

}  // namespace moecached
