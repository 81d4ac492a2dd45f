#include "daemon/platform/unix_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "daemon/base/check.h"

namespace moecached {
namespace {

constexpr int kPacketType = SOCK_SEQPACKET | SOCK_CLOEXEC;

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty()) return Fault{FaultCode::kInvalid, "the path of the socket is empty"};
  if (path.size() >= sizeof address.sun_path) {
    return Fault{FaultCode::kInvalid, "the socket path \"" + path + "\" has " + std::to_string(path.size()) +
                                          " bytes, and a Unix socket's can have " +
                                          std::to_string(sizeof address.sun_path - 1) +
                                          ": choose a shorter folder"};
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

const sockaddr* generic(const sockaddr_un& address) { return reinterpret_cast<const sockaddr*>(&address); }

Result<gid_t> group_id(const std::string& name) {
  std::array<char, 16384> buffer{};
  group entry{};
  group* found = nullptr;
  const int error_number = ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (error_number != 0) return system_fault("looking up group \"" + name + "\"", error_number);
  if (found == nullptr)
    return Fault{FaultCode::kInvalid, "there is no group \"" + name + "\" for the socket"};
  return entry.gr_gid;
}

// Makes "look whether it is stale, remove, bind, listen" one step among daemons that start at the same time.
// The lock is on the folder, so that no lock file stays behind, and is gone when the descriptor is closed.
Result<UniqueFd> lock_folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return system_fault("open the socket's folder " + folder, errno);
  while (::flock(fd.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return system_fault("lock the socket's folder " + folder, errno);
  }
  return fd;
}

Status remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return ok();
    return system_fault("look at " + path, errno);
  }
  if (!S_ISSOCK(status.st_mode)) {
    return Fault{FaultCode::kInvalid, path + " exists and is not a socket: remove it or choose another path"};
  }
  UniqueFd probe(::socket(AF_UNIX, kPacketType | SOCK_NONBLOCK, 0));
  if (!probe) return system_fault("socket", errno);
  // EAGAIN: somebody listens and is busy. EPROTOTYPE: somebody listens for another kind of socket.
  if (::connect(probe.get(), generic(address), sizeof address) == 0 || errno == EAGAIN ||
      errno == EPROTOTYPE) {
    return Fault{FaultCode::kLimit, "another process already listens on " + path};
  }
  if (errno != ECONNREFUSED) return system_fault("find out whether anybody listens on " + path, errno);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    return system_fault("remove the stale socket " + path, errno);
  return ok();
}

// Closes what it holds when not released: a packet that is refused must not leak its descriptors.
std::vector<UniqueFd> take_fds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr;
       control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t n = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < n; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

struct alignas(cmsghdr) ControlBuffer {
  std::array<char, CMSG_SPACE(sizeof(int) * kMaxPacketFds)> bytes{};
};

}  // namespace

Result<PacketListener> PacketListener::listen(const ListenOptions& options) {
  Result<sockaddr_un> address = address_of(options.path);
  if (!address) return std::move(address).error();
  std::optional<gid_t> group;
  if (!options.group.empty()) {
    Result<gid_t> id = group_id(options.group);
    if (!id) return std::move(id).error();
    group = *id;
  }
  UniqueFd fd(::socket(AF_UNIX, kPacketType | SOCK_NONBLOCK, 0));
  if (!fd) return system_fault("socket", errno);
  Result<UniqueFd> lock = lock_folder_of(options.path);
  if (!lock) return std::move(lock).error();
  if (Status status = remove_stale(options.path, *address); !status) return std::move(status).error();

  // Linux gives the file the socket's own mode (less the umask): nobody else can connect before group and
  // mode are set.
  if (::fchmod(fd.get(), 0600) != 0) return system_fault("fchmod of the socket", errno);
  if (::bind(fd.get(), generic(*address), sizeof *address) != 0)
    return system_fault("bind " + options.path, errno);
  struct stat status {};
  if (::lstat(options.path.c_str(), &status) != 0) return system_fault("look at " + options.path, errno);
  PacketListener listener(std::move(fd), options.path, status.st_dev, status.st_ino);
  if (group && ::lchown(options.path.c_str(), static_cast<uid_t>(-1), *group) != 0) {
    return system_fault("give " + options.path + " to group \"" + options.group + "\"", errno);
  }
  if (::chmod(options.path.c_str(), options.mode) != 0) return system_fault("chmod " + options.path, errno);
  if (::listen(listener.fd(), options.backlog) != 0) return system_fault("listen on " + options.path, errno);
  return listener;
}

PacketListener::PacketListener(PacketListener&& other) noexcept
    : fd_(std::move(other.fd_)),
      path_(std::exchange(other.path_, std::string())),
      device_(other.device_),
      inode_(other.inode_) {}

PacketListener::~PacketListener() {
  if (path_.empty()) return;
  struct stat status {};
  if (::lstat(path_.c_str(), &status) != 0) return;
  if (status.st_dev == device_ && status.st_ino == inode_) ::unlink(path_.c_str());
}

Result<UniqueFd> PacketListener::accept() {
  while (true) {
    UniqueFd connection(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection) return connection;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return UniqueFd();
    if (errno != EINTR && errno != ECONNABORTED) return system_fault("accept on " + path_, errno);
  }
}

Result<UniqueFd> connect_packet_socket(const std::string& path, std::uint32_t timeout_ms) {
  Result<sockaddr_un> address = address_of(path);
  if (!address) return std::move(address).error();
  UniqueFd fd(::socket(AF_UNIX, kPacketType, 0));
  if (!fd) return system_fault("socket", errno);
  // A full backlog has no event to poll for, but a blocking connect obeys the send timeout. 0 would mean no
  // timeout.
  timeval timeout{};
  timeout.tv_sec = timeout_ms / 1000;
  timeout.tv_usec = timeout_ms == 0 ? 1 : static_cast<suseconds_t>(timeout_ms % 1000) * 1000;
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout) != 0) {
    return system_fault("SO_SNDTIMEO", errno);
  }
  while (::connect(fd.get(), generic(*address), sizeof *address) != 0) {
    if (errno == EINTR) continue;
    Fault fault = system_fault("connect to " + path, errno);
    if (errno == EAGAIN) {
      fault.code = FaultCode::kLimit;
      fault.text += ": not accepted within " + std::to_string(timeout_ms) + " ms";
    } else if (errno == ENOENT || errno == ECONNREFUSED) {
      fault.code = FaultCode::kNotFound;
      fault.text += ": is the daemon running?";
    }
    return fault;
  }
  timeout = {};
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout) != 0) {
    return system_fault("SO_SNDTIMEO", errno);
  }
  return fd;
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    return system_fault("SO_PEERCRED", errno);
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

Result<PacketOutcome> send_packet(int fd, std::span<const std::byte> bytes, std::span<const int> fds) {
  CHECK(!bytes.empty() && fds.size() <= kMaxPacketFds);
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // sendmsg does not write to it
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  ControlBuffer control;
  if (!fds.empty()) {
    message.msg_control = control.bytes.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  while (true) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent >= 0) return PacketOutcome::kDone;  // packets are sent whole or not at all
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return PacketOutcome::kWouldBlock;
    if (errno == EPIPE || errno == ECONNRESET) return PacketOutcome::kClosed;
    return system_fault("send of " + std::to_string(bytes.size()) + " bytes with " +
                            std::to_string(fds.size()) + " descriptors",
                        errno);
  }
}

Result<ReceivedPacket> receive_packet(int fd, std::span<std::byte> buffer, std::size_t max_fds) {
  CHECK(!buffer.empty() && max_fds <= kMaxPacketFds);
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  ControlBuffer control;
  ssize_t n = 0;
  do {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes.data();
    // CMSG_LEN, not CMSG_SPACE: its padding would let one descriptor too many in.
    message.msg_controllen = CMSG_LEN(sizeof(int) * max_fds);
    n = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return ReceivedPacket{PacketOutcome::kWouldBlock, 0, {}};
    if (errno == ECONNRESET) return ReceivedPacket{PacketOutcome::kClosed, 0, {}};
    return system_fault("receive", errno);
  }
  std::vector<UniqueFd> fds = take_fds(message);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Fault{FaultCode::kInvalid,
                 "a packet with more descriptors than the " + std::to_string(max_fds) +
                     " it may have, or than this process may still open (RLIMIT_NOFILE)"};
  }
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return Fault{FaultCode::kInvalid, "a packet longer than " + std::to_string(buffer.size()) + " bytes"};
  }
  if (n == 0) return ReceivedPacket{PacketOutcome::kClosed, 0, {}};
  return ReceivedPacket{PacketOutcome::kDone, static_cast<std::size_t>(n), std::move(fds)};
}

}  // namespace moecached
