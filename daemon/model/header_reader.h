// Reads a file's header from front to back with pread, through one small buffer: no mmap (a file that shrinks
// under a mapping is a SIGBUS, not an error), and the descriptor's own position is left alone. Little-endian
// values. Not for weights. Thread: one at a time. Memory: kBufferBytes, whatever the file says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

class HeaderReader {
 public:
  static constexpr std::size_t kBufferBytes = 64u << 10;

  // fd: borrowed, a regular file. Nothing at or after byte `header_bytes_max` is read.
  static Result<HeaderReader> open(int fd, std::uint64_t header_bytes_max);

  [[nodiscard]] std::uint64_t file_bytes() const { return file_bytes_; }
  [[nodiscard]] std::uint64_t position() const { return position_; }
  [[nodiscard]] std::uint64_t remaining() const { return end_ - position_; }

  // False: nothing more can be read, and fault() says why.
  [[nodiscard]] bool read(std::span<std::byte> out);
  [[nodiscard]] bool read_u32(std::uint32_t& out);
  [[nodiscard]] bool read_u64(std::uint64_t& out);
  [[nodiscard]] bool skip(std::uint64_t bytes);

  // Refuses a claim of more than remaining(): "key 'x' has 9 bytes" + ", only 8 are left of the file (100
  // bytes)". kInvalid where the file ends, kLimit where the header may not go on.
  [[nodiscard]] Fault too_long(std::string claim) const;

  // Why the last call returned false; `what` names the thing that was being read.
  [[nodiscard]] Fault fault(std::string_view what) const { return Fault(fault_).with_context(what); }

 private:
  HeaderReader(int fd, std::uint64_t file_bytes, std::uint64_t end);
  [[nodiscard]] bool check_remaining(std::uint64_t bytes);
  [[nodiscard]] bool fill();

  int fd_;
  std::uint64_t file_bytes_;
  std::uint64_t end_;           // first byte that may not be read
  std::uint64_t position_ = 0;  // of the next byte handed out
  std::vector<std::byte> buffer_;
  std::uint64_t buffer_start_ = 0;  // position in the file of buffer_[0]
  std::size_t buffer_used_ = 0;
  Fault fault_;
};

}  // namespace moecached
