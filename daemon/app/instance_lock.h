// One daemon per control socket: an exclusive lock on "<control socket>.lock", held until exit. A socket file
// alone cannot tell two daemons that start at the same moment apart, and binding would take a living daemon's
// file away. Thread: main.
#pragma once

#include <optional>
#include <string>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

class InstanceLock {
 public:
  // Nothing: another process holds it; *holder names it then. Fault: the file cannot be made.
  [[nodiscard]] static Result<std::optional<InstanceLock>> acquire(const std::string& path,
                                                                   std::string* holder);

 private:
  explicit InstanceLock(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd
      fd_;  // closing it gives the lock up; the file stays, for unlinking it would let two hold "the" lock
};

}  // namespace moecached
