// An eventfd: one side signals, the other finds the descriptor readable. Several signals before a drain are
// one. Thread: any, both sides.
#pragma once

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

class EventFd {
 public:
  EventFd() = default;
  [[nodiscard]] static Result<EventFd> create();  // non-blocking, close-on-exec
  // Takes a descriptor received from elsewhere.
  explicit EventFd(UniqueFd fd) : fd_(std::move(fd)) {}
  [[nodiscard]] int fd() const { return fd_.get(); }
  void signal() const noexcept;
  void drain() const noexcept;  // never blocks

 private:
  UniqueFd fd_;
};

}  // namespace moecached
