// What systemd wants to hear from a Type=notify service. Without systemd ($NOTIFY_SOCKET unset) every call
// does nothing. Thread: main.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace moecached {

class ServiceManager {
 public:
  ServiceManager();  // reads the environment, and clears the watchdog's so that children do not inherit it
  void ready(const std::string& status) const;
  void status(const std::string& status) const;
  void reloading() const;  // followed by ready()
  void stopping() const;
  void alive() const;  // resets the watchdog
  // How often alive() must be called: half of WatchdogSec=. Nothing: no watchdog.
  [[nodiscard]] std::optional<std::chrono::milliseconds> watchdog_interval() const {
    return watchdog_interval_;
  }

 private:
  std::optional<std::chrono::milliseconds> watchdog_interval_;
};

}  // namespace moecached
