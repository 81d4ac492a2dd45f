// A descriptor that stands for a process and becomes readable when it has exited. Unlike a pid it is never
// reused, and unlike a socket it says that the process' memory mappings are gone too. Thread: any.
#pragma once

#include <sys/types.h>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

// kNotFound: no such process (any more), or it lives in a PID namespace that we cannot see (pid 0).
[[nodiscard]] Result<UniqueFd> open_pidfd(pid_t pid);

struct ReceivedPidfd {
  UniqueFd fd;
  pid_t pid = 0;  // in our namespace; 0: not visible from here; -1: already gone
};
// Checks that a descriptor that a client sent is a pidfd at all: any other kind might never become readable,
// and the client would never be seen to die. kInvalid: it is not (the descriptor is closed).
[[nodiscard]] Result<ReceivedPidfd> check_pidfd(UniqueFd fd);

[[nodiscard]] bool process_exited(int pidfd) noexcept;

}  // namespace moecached
