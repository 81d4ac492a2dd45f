#include "daemon/platform/epoll.h"

#include <cerrno>

#include "daemon/base/check.h"

namespace moecached {
namespace {

Status control(int epoll, int operation, int fd, std::uint32_t events, std::uint64_t token) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(epoll, operation, fd, &event) != 0) {
    return system_fault("epoll_ctl of descriptor " + std::to_string(fd), errno);
  }
  return ok();
}

}  // namespace

Result<Epoll> Epoll::create() {
  UniqueFd fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!fd) return system_fault("epoll_create1", errno);
  return Epoll(std::move(fd));
}

Status Epoll::add(int fd, std::uint32_t events, std::uint64_t token) {
  return control(fd_.get(), EPOLL_CTL_ADD, fd, events, token);
}

Status Epoll::modify(int fd, std::uint32_t events, std::uint64_t token) {
  return control(fd_.get(), EPOLL_CTL_MOD, fd, events, token);
}

void Epoll::remove(int fd) noexcept {
  epoll_event unused{};
  ::epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, &unused);
}

std::size_t Epoll::wait(std::span<epoll_event> events, int timeout_ms) noexcept {
  const int n = ::epoll_wait(fd_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  if (n >= 0) return static_cast<std::size_t>(n);
  CHECK(errno == EINTR);  // every other error is a bug of ours: a bad descriptor or an empty span
  return 0;
}

}  // namespace moecached
