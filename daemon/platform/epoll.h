// Waits for many descriptors at once; each carries a 64-bit token that comes back with its events.
// Level-triggered. Thread: one waits; add, modify and remove may be called from any.
#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

class Epoll {
 public:
  [[nodiscard]] static Result<Epoll> create();
  [[nodiscard]] int fd() const { return fd_.get(); }
  // events: EPOLLIN | EPOLLOUT ...; EPOLLHUP and EPOLLERR always come.
  Status add(int fd, std::uint32_t events, std::uint64_t token);
  Status modify(int fd, std::uint32_t events, std::uint64_t token);
  void remove(int fd) noexcept;
  // Returns how many entries of `events` were filled; 0 after timeout_ms (-1: wait for ever) or a signal.
  [[nodiscard]] std::size_t wait(std::span<epoll_event> events, int timeout_ms) noexcept;

 private:
  explicit Epoll(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace moecached
