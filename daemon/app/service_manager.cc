#include "daemon/app/service_manager.h"

#include <systemd/sd-daemon.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

namespace moecached {
namespace {
void notify(const std::string& state) { (void)::sd_notify(0, state.c_str()); }
}  // namespace

ServiceManager::ServiceManager() {
  std::uint64_t usec = 0;
  if (::sd_watchdog_enabled(1, &usec) > 0) {
    watchdog_interval_ = std::max(std::chrono::milliseconds(1), std::chrono::milliseconds(usec / 2000));
  }
}

void ServiceManager::ready(const std::string& status) const { notify("READY=1\nSTATUS=" + status); }
void ServiceManager::status(const std::string& status) const { notify("STATUS=" + status); }
void ServiceManager::stopping() const { notify("STOPPING=1\nSTATUS=stopping"); }
void ServiceManager::alive() const { notify("WATCHDOG=1"); }

void ServiceManager::reloading() const {
  // Type=notify-reload (systemd 253) needs the time, to tell this reload's READY=1 from an earlier one.
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t usec = std::int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1'000;
  notify("RELOADING=1\nMONOTONIC_USEC=" + std::to_string(usec));
}

}  // namespace moecached
