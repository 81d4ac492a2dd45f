#include "daemon/model/header_reader.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace moecached {

static_assert(std::endian::native == std::endian::little, "values are copied as they lie in the file");

HeaderReader::HeaderReader(int fd, std::uint64_t file_bytes, std::uint64_t end)
    : fd_(fd), file_bytes_(file_bytes), end_(end), buffer_(kBufferBytes) {}

Result<HeaderReader> HeaderReader::open(int fd, std::uint64_t header_bytes_max) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_fault("fstat", errno);
  if (!S_ISREG(status.st_mode)) return Fault{FaultCode::kInvalid, "not a regular file"};
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  return HeaderReader(fd, file_bytes, std::min(file_bytes, header_bytes_max));
}

Fault HeaderReader::too_long(std::string claim) const {
  const bool whole_file = end_ == file_bytes_;
  claim += ", only " + std::to_string(remaining()) + " bytes are left of the ";
  claim += (whole_file ? "file (" : "longest header that is read (") + std::to_string(end_) + " bytes)";
  return Fault{whole_file ? FaultCode::kInvalid : FaultCode::kLimit, std::move(claim)};
}

bool HeaderReader::check_remaining(std::uint64_t bytes) {
  if (bytes <= remaining()) return true;
  fault_ = too_long(std::to_string(bytes) + " bytes are needed at byte " + std::to_string(position_));
  return false;
}

bool HeaderReader::fill() {
  const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(kBufferBytes, remaining()));
  ssize_t got = 0;
  do {
    got = ::pread(fd_, buffer_.data(), wanted, static_cast<off_t>(position_));
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    fault_ = system_fault("pread at byte " + std::to_string(position_), errno);
    return false;
  }
  if (got == 0) {
    fault_ = Fault{FaultCode::kChanged, "the file became shorter while it was read: it ends at byte " +
                                            std::to_string(position_) + " of " + std::to_string(file_bytes_)};
    return false;
  }
  buffer_start_ = position_;
  buffer_used_ = static_cast<std::size_t>(got);
  return true;
}

bool HeaderReader::read(std::span<std::byte> out) {
  if (!check_remaining(out.size())) return false;
  while (!out.empty()) {
    if (position_ < buffer_start_ || position_ >= buffer_start_ + buffer_used_) {
      if (!fill()) return false;
    }
    const auto at = static_cast<std::size_t>(position_ - buffer_start_);
    const std::size_t n = std::min(out.size(), buffer_used_ - at);
    std::memcpy(out.data(), buffer_.data() + at, n);
    out = out.subspan(n);
    position_ += n;
  }
  return true;
}

bool HeaderReader::read_u32(std::uint32_t& out) { return read(std::as_writable_bytes(std::span(&out, 1))); }
bool HeaderReader::read_u64(std::uint64_t& out) { return read(std::as_writable_bytes(std::span(&out, 1))); }

bool HeaderReader::skip(std::uint64_t bytes) {
  if (!check_remaining(bytes)) return false;
  position_ += bytes;
  return true;
}

}  // namespace moecached
