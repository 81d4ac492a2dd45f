// Signals as events of the main thread. Constructed before any other thread starts, so that all inherit the
// blocked mask and none is interrupted. Thread: main.
#pragma once

#include <chrono>
#include <optional>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

enum class SignalEvent : unsigned char { kStop, kReload, kTimeout };

class Signals {
 public:
  // Blocks SIGTERM, SIGINT and SIGHUP, and ignores SIGPIPE: a peer that closes its socket is an error code,
  // not our end.
  [[nodiscard]] static Result<Signals> take_over();
  // Waits for the next one; without a timeout, forever.
  [[nodiscard]] Result<SignalEvent> wait(std::optional<std::chrono::milliseconds> timeout);

 private:
  explicit Signals(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace moecached
