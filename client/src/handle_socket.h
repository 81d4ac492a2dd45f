// The handle socket: messages with file descriptors, one a packet (proto/shm/layout.h). It checks the frame
// (magic, version, type, size, number of descriptors), not what the descriptors hold; segments.h does.
// Thread: send and receive under the session's lock; hung_up from any. Memory: received descriptors belong to
// the message and are closed with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/resources.h"
#include "proto/shm/layout.h"

namespace moecached::client {

class HandleSocket {
 public:
  // MOECACHED_E_UNAVAILABLE: nobody listens at `path`.
  [[nodiscard]] static moecached_status connect(const char* path, HandleSocket* out);

  // `message` starts with a moecached_handle_header, which this fills in.
  template <typename T>
  [[nodiscard]] moecached_status send(T* message, moecached_handle_type type, std::span<const int> fds) {
    message->header = {MOECACHED_HANDLE_MAGIC, MOECACHED_HANDLE_VERSION, static_cast<std::uint16_t>(type),
                       sizeof(T), static_cast<std::uint32_t>(fds.size())};
    return send_packet(message, sizeof(T), fds);
  }

  // Waits for the answer of `type` with exactly `n_fds` descriptors. An ERROR message becomes its status and
  // text: MOECACHED_E_VERSION or MOECACHED_E_REFUSED. No answer in time: MOECACHED_E_UNAVAILABLE; the socket
  // is of no further use then, since a late answer would be taken for the next one.
  template <typename T>
  [[nodiscard]] moecached_status receive(T* message, moecached_handle_type type, std::size_t n_fds,
                                         int timeout_ms, std::vector<UniqueFd>* fds) {
    return receive_packet(message, sizeof(T), type, {n_fds, n_fds}, timeout_ms, fds);
  }

  // The same for an answer with any number of descriptors within `n_fds`.
  struct FdCount {
    std::size_t min = 0;
    std::size_t max = 0;
  };
  template <typename T>
  [[nodiscard]] moecached_status receive_some(T* message, moecached_handle_type type, FdCount n_fds,
                                              int timeout_ms, std::vector<UniqueFd>* fds) {
    return receive_packet(message, sizeof(T), type, n_fds, timeout_ms, fds);
  }

  // The other end is closed: the daemon is gone. One system call, never blocks.
  [[nodiscard]] bool hung_up() const noexcept;

 private:
  moecached_status send_packet(const void* message, std::size_t bytes, std::span<const int> fds);
  moecached_status receive_packet(void* message, std::size_t bytes, moecached_handle_type type, FdCount n_fds,
                                  int timeout_ms, std::vector<UniqueFd>* fds);

  UniqueFd fd_;
};

}  // namespace moecached::client
