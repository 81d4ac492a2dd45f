#include "daemon/warmth/prewarm_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "daemon/platform/fd.h"
#include "daemon/warmth/hot_list.h"
#include "daemon/warmth/imatrix.h"

namespace moecached {
namespace {

Result<std::uint64_t> bytes_of_regular(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_fault("fstat", errno);
  if (!S_ISREG(status.st_mode)) return Fault{FaultCode::kInvalid, "is not a regular file"};
  return static_cast<std::uint64_t>(status.st_size);
}

Result<std::string> read_all(int fd, std::uint64_t bytes, std::size_t bytes_max) {
  if (bytes > bytes_max) {
    return Fault{FaultCode::kLimit, "has " + std::to_string(bytes) + " bytes, at most " +
                                        std::to_string(bytes_max) + " are read"};
  }
  std::string text(static_cast<std::size_t>(bytes), '\0');
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t got = ::pread(fd, text.data() + at, text.size() - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_fault("read", errno);
    if (got == 0) return Fault{FaultCode::kChanged, "became shorter while it was read"};
    at += static_cast<std::size_t>(got);
  }
  return text;
}

Result<UseList> read_list(int fd, std::span<const BlockShape> shapes) {
  const auto bytes = bytes_of_regular(fd);
  if (!bytes) return bytes.error();
  char magic[4] = {};
  if (::pread(fd, magic, sizeof magic, 0) != sizeof magic)
    return Fault{FaultCode::kInvalid, "is too short for any file of counts"};
  constexpr char kZstd[4] = {'\x28', '\xb5', '\x2f', '\xfd'};
  if (std::memcmp(magic, kZstd, sizeof magic) == 0)
    return Fault{FaultCode::kInvalid, "is compressed: unpack it first (zstd -d)"};
  if (std::memcmp(magic, "GGUF", sizeof magic) == 0) return read_imatrix_gguf(fd);
  if (magic[0] != '#') return read_imatrix_legacy(fd, shapes);
  auto text = read_all(fd, *bytes, kHotListBytesMax);
  if (!text) return std::move(text).error();
  auto lists = parse_hot_lists(*text);
  if (!lists) return std::move(lists).error();
  return sum_of(lists->lists);
}

}  // namespace

Result<UseList> read_prewarm_source(int fd, std::span<const BlockShape> shapes) {
  auto list = read_list(fd, shapes);
  if (!list) return std::move(list).error();
  return fit_to(*list, shapes);
}

Result<std::string> read_small_file(const std::string& path, std::size_t bytes_max) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) {
    Fault fault = system_fault("open", errno);
    if (errno == ENOENT) fault.code = FaultCode::kNotFound;
    return fault;
  }
  const auto bytes = bytes_of_regular(fd.get());
  if (!bytes) return bytes.error();
  return read_all(fd.get(), *bytes, bytes_max);
}

}  // namespace moecached
