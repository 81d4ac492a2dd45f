#include "daemon/app/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

namespace moecached {

Result<Signals> Signals::take_over() {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&set, number);
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, nullptr); error != 0)
    return system_fault("block signals", error);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) return system_fault("create a signalfd", errno);
  return Signals(std::move(fd));
}

Result<SignalEvent> Signals::wait(std::optional<std::chrono::milliseconds> timeout) {
  while (true) {
    pollfd entry{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&entry, 1, timeout ? static_cast<int>(timeout->count()) : -1);
    if (ready == 0) return SignalEvent::kTimeout;
    if (ready < 0) {
      if (errno == EINTR) continue;  // a stopped and continued process
      return system_fault("wait for signals", errno);
    }
    signalfd_siginfo info{};
    if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) continue;
    return info.ssi_signo == SIGHUP ? SignalEvent::kReload : SignalEvent::kStop;
  }
}

}  // namespace moecached
