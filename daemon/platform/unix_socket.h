// Packets and file descriptors between processes: SOCK_SEQPACKET Unix sockets, one message a packet.
// Descriptors arrive close-on-exec, and never more than the receiver asked for. Not a protocol:
// proto/shm/layout.h says what is in the packets. Thread: any; one thread per socket.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

inline constexpr std::size_t kMaxPacketFds = 253;  // SCM_MAX_FD of the kernel

struct ListenOptions {
  std::string path;
  std::uint32_t mode = 0660;
  std::string group = {};  // empty: unchanged
  int backlog = 64;
};

// Owns the socket file too: removes it at the end, if it is still its own.
class PacketListener {
 public:
  // Removes a stale socket file. kInvalid: path too long, no such group, or the path is something else than a
  // socket; kLimit: another daemon listens there.
  [[nodiscard]] static Result<PacketListener> listen(const ListenOptions& options);
  PacketListener(PacketListener&& other) noexcept;
  PacketListener& operator=(PacketListener&&) = delete;
  ~PacketListener();
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] const std::string& path() const { return path_; }
  // A non-blocking connection, or an empty descriptor when nobody waits.
  [[nodiscard]] Result<UniqueFd> accept();

 private:
  PacketListener(UniqueFd fd, std::string path, dev_t device, ino_t inode)
      : fd_(std::move(fd)), path_(std::move(path)), device_(device), inode_(inode) {}
  UniqueFd fd_;
  std::string path_;  // empty: moved from
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Blocking afterwards. kNotFound: nobody listens; kLimit: not accepted in time.
[[nodiscard]] Result<UniqueFd> connect_packet_socket(const std::string& path, std::uint32_t timeout_ms);

struct PeerCredentials {
  pid_t pid = 0;  // 0: of a PID namespace that cannot be seen from here
  uid_t uid = 0;
  gid_t gid = 0;
};
[[nodiscard]] Result<PeerCredentials> peer_credentials(int fd);

enum class PacketOutcome : std::uint8_t { kDone, kWouldBlock, kClosed };

// fds stay the caller's. REQUIRES: at most kMaxPacketFds, and a packet that is not empty.
[[nodiscard]] Result<PacketOutcome> send_packet(int fd, std::span<const std::byte> bytes,
                                                std::span<const int> fds = {});

struct ReceivedPacket {
  PacketOutcome outcome = PacketOutcome::kDone;
  std::size_t n_bytes = 0;  // at the start of the caller's buffer
  std::vector<UniqueFd> fds;
};
// kInvalid: longer than the buffer, or with more descriptors than max_fds; all of them are closed then.
[[nodiscard]] Result<ReceivedPacket> receive_packet(int fd, std::span<std::byte> buffer, std::size_t max_fds);

}  // namespace moecached
