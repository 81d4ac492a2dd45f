// Model files as the daemon reads them: what makes a file "the same file" later, and a descriptor of its own
// that reads past the page cache where the file system can. Thread: any.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

// Renaming, linking or chmod leave it equal; writing and truncating do not. A write through a shared mapping
// moves the time only when the kernel next writes the page back.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t bytes = 0;
  std::int64_t mtime_ns = 0;
  bool operator==(const FileIdentity&) const = default;
};
[[nodiscard]] Result<FileIdentity> file_identity(int fd);

struct ReadableFile {
  UniqueFd fd;
  FileIdentity identity;
  std::uint32_t direct_alignment =
      0;               // of offset, length and memory; a power of two; 0: read through the page cache
  std::string reason;  // why 0, when direct was asked for
};
inline constexpr std::uint32_t kAlignmentMax = 64u << 10;

// Opens the file behind `fd` anew, read-only: the flags of a description that came from a client are shared
// with it, so setting O_DIRECT there (done only where opening anew is refused) changes the client's own reads
// too. direct_alignment_max: at most kAlignmentMax; 0: do not try direct reads. kInvalid: not a regular file,
// or not open for reading.
[[nodiscard]] Result<ReadableFile> open_for_reading(UniqueFd fd, std::uint32_t direct_alignment_max);

// Tells the kernel that the page cache need not keep these bytes. Whole pages, widened outwards.
void drop_page_cache(int fd, std::uint64_t offset, std::uint64_t bytes) noexcept;

}  // namespace moecached
