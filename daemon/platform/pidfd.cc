#include "daemon/platform/pidfd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

namespace moecached {

Result<UniqueFd> open_pidfd(pid_t pid) {
  if (pid <= 0)
    return Fault{FaultCode::kNotFound, "process id " + std::to_string(pid) + " is of another PID namespace"};
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // always close-on-exec
  if (fd) return fd;
  Fault fault = system_fault("pidfd_open of process " + std::to_string(pid), errno);
  if (errno == ESRCH) fault.code = FaultCode::kNotFound;
  return fault;
}

Result<ReceivedPidfd> check_pidfd(UniqueFd fd) {
  // Only pidfds have a "Pid:" line there; what a client names its files has no influence on it.
  const std::string path = "/proc/self/fdinfo/" + std::to_string(fd.get());
  UniqueFd info(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!info) return system_fault("open " + path, errno);
  std::array<char, 4096> buffer{};
  std::size_t n_bytes = 0;
  while (n_bytes < buffer.size()) {
    const ssize_t n = ::read(info.get(), buffer.data() + n_bytes, buffer.size() - n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return system_fault("read " + path, errno);
    if (n == 0) break;
    n_bytes += static_cast<std::size_t>(n);
  }
  const std::string_view text(buffer.data(), n_bytes);
  constexpr std::string_view kKey = "\nPid:\t";
  const std::size_t at = text.find(kKey);
  if (at == std::string_view::npos) {
    return Fault{FaultCode::kInvalid, "the descriptor sent as the client's pidfd is not a pidfd"};
  }
  ReceivedPidfd received;
  const std::string_view digits = text.substr(at + kKey.size());
  std::from_chars(digits.data(), digits.data() + digits.size(), received.pid);
  received.fd = std::move(fd);
  return received;
}

bool process_exited(int pidfd) noexcept {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
}

}  // namespace moecached
