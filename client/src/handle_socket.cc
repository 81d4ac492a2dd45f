#include "client/src/handle_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "client/src/error.h"

namespace moecached::client {
namespace {

constexpr std::size_t kLargestMessage = 1024;
static_assert(sizeof(moecached_handle_error) <= kLargestMessage);
static_assert(sizeof(moecached_handle_model_opened) <= kLargestMessage);
// The kernel passes at most 253 descriptors with one message (SCM_MAX_FD).
constexpr std::size_t kLargestFdCount = MOECACHED_MAX_FILES;
static_assert(kLargestFdCount <= 253 && kLargestFdCount >= MOECACHED_FETCH_MAX);

constexpr const char* kUpgrade = "daemon and client are of different versions; upgrade the older one";

// Takes over every descriptor of a received message, wanted or not: an unwanted one would leak.
void adopt_descriptors(msghdr* header, std::vector<UniqueFd>* fds) {
  for (cmsghdr* control = CMSG_FIRSTHDR(header); control != nullptr; control = CMSG_NXTHDR(header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof fd);
      fds->emplace_back(fd);
    }
  }
}

moecached_status refused(const std::byte* packet, std::size_t bytes, bool version_differs) {
  moecached_handle_error error{};
  std::memcpy(&error, packet, std::min(bytes, sizeof error));
  error.text[sizeof error.text - 1] = '\0';
  const bool version = version_differs || error.code == MOECACHED_ERROR_VERSION;
  const bool spill = error.code == MOECACHED_ERROR_SPILL;
  return fail(version ? MOECACHED_E_VERSION
              : spill ? MOECACHED_E_SPILL
                      : MOECACHED_E_REFUSED,
              "the daemon refused: %s", error.text);
}

}  // namespace

moecached_status HandleSocket::connect(const char* path, HandleSocket* out) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (std::strlen(path) >= sizeof address.sun_path) {
    return fail(MOECACHED_E_ARGUMENT, "the socket path is longer than %zu characters: %s",
                sizeof address.sun_path - 1, path);
  }
  std::strcpy(address.sun_path, path);
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return fail(MOECACHED_E_SYSTEM, "cannot make a Unix socket: %s", error_name(errno));
  int result = 0;
  do {
    result = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    return fail(MOECACHED_E_UNAVAILABLE,
                "no moecached daemon answers at %s (%s); is it running, and may this "
                "user open its socket?",
                path, error_name(errno));
  }
  out->fd_ = std::move(fd);
  return MOECACHED_OK;
}

moecached_status HandleSocket::send_packet(const void* message, std::size_t bytes, std::span<const int> fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(kLargestFdCount * sizeof(int))] = {};
  if (fds.size() > kLargestFdCount) {
    return fail(MOECACHED_E_ARGUMENT, "%zu descriptors in one message, at most %zu are possible", fds.size(),
                kLargestFdCount);
  }
  iovec part{const_cast<void*>(message), bytes};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon does not take messages any more: %s", error_name(errno));
  }
  return MOECACHED_OK;
}

moecached_status HandleSocket::receive_packet(void* message, std::size_t bytes, moecached_handle_type type,
                                              FdCount n_fds, int timeout_ms, std::vector<UniqueFd>* fds) {
  pollfd wanted{fd_.get(), POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&wanted, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon did not answer within %d ms", timeout_ms);
  }

  alignas(8) std::byte packet[kLargestMessage];
  alignas(cmsghdr) char control[CMSG_SPACE(kLargestFdCount * sizeof(int))];
  iovec part{packet, sizeof packet};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t received = 0;
  do {
    received = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received <= 0) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon closed the connection%s%s", received < 0 ? ": " : "",
                received < 0 ? error_name(errno) : "");
  }
  fds->clear();
  adopt_descriptors(&header, fds);

  const std::size_t size = static_cast<std::size_t>(received);
  moecached_handle_header frame{};
  std::memcpy(&frame, packet, std::min(size, sizeof frame));
  if (size < sizeof frame || frame.magic != MOECACHED_HANDLE_MAGIC) {
    return fail(MOECACHED_E_VERSION, "what answers at the handle socket is not a moecached daemon");
  }
  if (frame.type == MOECACHED_HANDLE_ERROR) {
    return refused(packet, size, frame.version != MOECACHED_HANDLE_VERSION);
  }
  if (frame.version != MOECACHED_HANDLE_VERSION) {
    return fail(MOECACHED_E_VERSION,
                "the daemon speaks version %u of the handle protocol, this client %u: %s", frame.version,
                unsigned{MOECACHED_HANDLE_VERSION}, kUpgrade);
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return fail(MOECACHED_E_SYSTEM,
                "this process has no room for %u more descriptors: raise its limit of open files "
                "(ulimit -n)",
                frame.n_fds);
  }
  if ((header.msg_flags & MSG_TRUNC) != 0 || frame.type != type || size != bytes || frame.bytes != bytes ||
      frame.n_fds != fds->size() || fds->size() < n_fds.min || fds->size() > n_fds.max) {
    return fail(
        MOECACHED_E_VERSION,
        "the daemon's message (type %u, %zu bytes, %zu descriptors) is not the expected one (type %u, %zu "
        "bytes, %zu descriptors): %s",
        frame.type, size, fds->size(), static_cast<unsigned>(type), bytes, n_fds.max, kUpgrade);
  }
  std::memcpy(message, packet, bytes);
  return MOECACHED_OK;
}

bool HandleSocket::hung_up() const noexcept {
  pollfd wanted{fd_.get(), POLLRDHUP, 0};
  return ::poll(&wanted, 1, 0) > 0 && (wanted.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace moecached::client
