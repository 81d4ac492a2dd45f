#include "daemon/platform/eventfd.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

namespace moecached {

Result<EventFd> EventFd::create() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) return system_fault("eventfd", errno);
  return EventFd(std::move(fd));
}

void EventFd::signal() const noexcept {
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full, so the descriptor is readable anyway.
  while (::write(fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void EventFd::drain() const noexcept {
  std::uint64_t count = 0;
  while (::read(fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
  }
}

}  // namespace moecached
