#include "daemon/control/socket_file.h"

#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <vector>

#include "daemon/platform/fd.h"

namespace moecached {
namespace {

Result<gid_t> find_group(const std::string& group) {
  gid_t number = 0;
  const auto [end, error] = std::from_chars(group.data(), group.data() + group.size(), number);
  if (error == std::errc() && end == group.data() + group.size()) return number;
  std::vector<char> buffer(4096);
  struct group entry {};
  struct group* found = nullptr;
  int failure = 0;
  while ((failure = ::getgrnam_r(group.c_str(), &entry, buffer.data(), buffer.size(), &found)) == ERANGE) {
    buffer.resize(buffer.size() * 2);
  }
  if (failure != 0) return system_fault("look up group " + group, failure);
  if (found == nullptr) return Fault{FaultCode::kNotFound, "there is no group named \"" + group + "\""};
  return entry.gr_gid;
}

std::string describe_peer(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  // Pid 0: a listener in another PID namespace.
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid == 0)
    return "a process of another container";
  std::string name;
  std::ifstream("/proc/" + std::to_string(peer.pid) + "/comm") >> name;
  return "pid " + std::to_string(peer.pid) + (name.empty() ? "" : " (" + name + ")");
}

}  // namespace

Result<std::optional<std::string>> socket_owner(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Fault{FaultCode::kInvalid, path + ": a socket path has at most " +
                                          std::to_string(sizeof address.sun_path - 1) + " bytes"};
  }
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return std::optional<std::string>{};
    return system_fault("look at " + path, errno);
  }
  if (!S_ISSOCK(status.st_mode)) {
    return Fault{FaultCode::kInvalid,
                 path + " exists and is not a socket: move it away or choose another path"};
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  // gRPC listens with streams, the handle socket with packets.
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return system_fault("create a socket", errno);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      return std::optional<std::string>(describe_peer(fd.get()));
    }
    // The backlog is full: somebody listens and does not get round to accepting.
    if (errno == EAGAIN) return std::optional<std::string>("a process that is too busy to answer");
    if (errno == ECONNREFUSED || errno == ENOENT) return std::optional<std::string>{};
    if (errno != EPROTOTYPE) break;
  }
  return system_fault("ask who listens at " + path, errno);
}

Status apply_socket_access(const std::string& path, const SocketAccess& access) {
  if (!access.group.empty()) {
    const Result<gid_t> group = find_group(access.group);
    if (!group) return Fault(group.error()).with_context(path);
    if (::chown(path.c_str(), static_cast<uid_t>(-1), *group) != 0) {
      Fault fault = system_fault("give " + path + " to group " + access.group, errno);
      if (fault.code == FaultCode::kSystem) fault.text += ": only root or a member of the group can";
      return fault;
    }
  }
  if (::chmod(path.c_str(), access.mode) != 0) return system_fault("set the mode of " + path, errno);
  return ok();
}

}  // namespace moecached
