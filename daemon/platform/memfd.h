// Memory that the daemon shares: a sealed memfd, which nobody can shrink under us (that would be SIGBUS) or
// grow. For ClientAccess::kReadOnly a receiver can neither map writable nor write nor punch holes. The
// daemon's own writable mapping is made before that seal and stays. Thread: any. Memory: populated by the
// kernel page by page, as it is touched.
//
// The kernel refuses holes to everybody once that seal (F_SEAL_FUTURE_WRITE) is there. Memory that is to be
// released in parts (kReadOnlyReleasable) goes without it: a receiver gets a descriptor that is open for
// reading alone, of an inode that nobody may open for writing (0400). Root, and the daemon's own user, can
// undo that; others cannot. So clients of the daemon's user are trusted not to, and deploy/kubernetes does
// without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

enum class ClientAccess : std::uint8_t { kReadOnly, kReadOnlyReleasable, kReadWrite };

// A shared mapping of a descriptor, unmapped by the destructor.
class Mapping {
 public:
  Mapping() = default;
  [[nodiscard]] static Result<Mapping> map(int fd, std::uint64_t bytes, ClientAccess access);
  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  void reset() noexcept;

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

class Memfd {
 public:
  Memfd() = default;
  // label: for people, seen in /proc/PID/maps. kInvalid: 0 bytes; kLimit, kSystem: the text says how much was
  // asked for.
  [[nodiscard]] static Result<Memfd> create(std::string_view label, std::uint64_t bytes, ClientAccess access);
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return mapping_.bytes(); }  // writable
  [[nodiscard]] std::uint64_t bytes_backed() const noexcept;
  // Copies out of it by the descriptor: a load from the mapping would allocate the pages of holes. kInvalid:
  // out of range.
  [[nodiscard]] Status read(std::uint64_t offset, std::span<std::byte> destination) const;
  // Punches a hole of the whole pages within: their memory is free, for every process that maps them, and
  // reads as zero when it is touched again. REQUIRES: made as kReadOnlyReleasable; nothing has them pinned (a
  // registered buffer would keep its own, stale copy).
  [[nodiscard]] Status release(std::uint64_t offset, std::uint64_t bytes) noexcept;

 private:
  Memfd(UniqueFd fd, Mapping mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {}
  UniqueFd fd_;
  Mapping mapping_;
};

}  // namespace moecached
