#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/conformance/device/client_view.h"

namespace moecached {

const char* host_client(int fd, std::span<const std::byte> expected) {
  const std::size_t n = expected.size();
  struct stat status {};
  if (::fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) != n)
    return "the descriptor has another size";
  void* const view = ::mmap(nullptr, n, PROT_READ, MAP_SHARED, fd, 0);
  if (view == MAP_FAILED) return "cannot be mapped for reading";
  if (std::memcmp(view, expected.data(), n) != 0) return "other bytes than were written";

  if (::mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
    return "can be mapped writable";
  if (::mprotect(view, n, PROT_READ | PROT_WRITE) == 0) return "the mapping can be made writable";
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int again = ::open(path, O_RDWR | O_CLOEXEC);
  if (again >= 0 && ::mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) != MAP_FAILED) {
    return "can be opened anew and mapped writable";
  }
  if (::pwrite(fd, "x", 1, 0) >= 0) return "can be written";
  if (::ftruncate(fd, 0) == 0) return "can be shrunk";
  if (::ftruncate(fd, static_cast<off_t>(n + 4096)) == 0) return "can be grown";
  if (::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0)
    return "holes can be punched";
  if (std::memcmp(view, expected.data(), n) != 0) return "bytes changed";
  return nullptr;
}

}  // namespace moecached
