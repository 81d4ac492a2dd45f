#include "daemon/app/instance_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

namespace moecached {

Result<std::optional<InstanceLock>> InstanceLock::acquire(const std::string& path, std::string* holder) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return system_fault("open " + path, errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return system_fault("lock " + path, errno);
    char pid[24];
    const ssize_t got = ::pread(fd.get(), pid, sizeof pid, 0);
    // Empty: the other one holds the lock and has not written its pid yet.
    *holder = got > 0 ? "pid " + std::string(pid, static_cast<std::size_t>(got)) : "another process";
    return std::optional<InstanceLock>{};
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return system_fault("write " + path, errno);
  }
  return std::optional<InstanceLock>(InstanceLock(std::move(fd)));
}

}  // namespace moecached
