#include "daemon/platform/file_roots.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <string>

namespace moecached {
namespace {

// Empty: too long, or none.
std::string path_of(int fd) {
  char path[PATH_MAX];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t n = ::readlink(link.c_str(), path, sizeof path);
  return n <= 0 || n == sizeof path ? std::string() : std::string(path, static_cast<std::size_t>(n));
}

UniqueFd open_beneath(int root, const std::string& path) {
  open_how how{};
  how.flags = O_PATH | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  // EAGAIN: something on the way was renamed meanwhile. Who renames for ever is refused.
  for (int attempt = 0; attempt < 16; ++attempt) {
    const long fd = ::syscall(SYS_openat2, root, path.c_str(), &how, sizeof how);
    if (fd >= 0) return UniqueFd(static_cast<int>(fd));
    if (errno != EAGAIN && errno != EINTR) break;
  }
  return UniqueFd();
}

bool is_same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

bool lies_beneath(int root, int fd, const std::string& path) {
  std::string prefix = path_of(root);
  if (prefix.empty() || path.empty()) return false;
  if (prefix.back() != '/') prefix += '/';
  if (!path.starts_with(prefix)) return false;
  const UniqueFd found = open_beneath(root, path.substr(prefix.size()));
  return found && is_same_file(found.get(), fd);
}

}  // namespace

Result<FileRoots> FileRoots::open(std::string_view paths) {
  FileRoots out;
  while (!paths.empty()) {
    const std::string path(paths.substr(0, paths.find(':')));
    paths.remove_prefix(std::min(paths.size(), path.size() + 1));
    UniqueFd root(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!root) return system_fault("open the root " + path, errno);
    // Or every file would be refused, and nobody would know why.
    if (!open_beneath(root.get(), ".")) return system_fault("openat2 of the root " + path, errno);
    out.roots_.push_back(std::move(root));
  }
  return out;
}

Status FileRoots::check(int fd) const {
  if (roots_.empty()) return ok();
  const std::string path = path_of(fd);
  for (const UniqueFd& root : roots_) {
    if (lies_beneath(root.get(), fd, path)) return ok();
  }
  return Fault{FaultCode::kInvalid, "the file does not lie where this daemon may read models (models.roots)"};
}

}  // namespace moecached
