// What the sessions of one user hold together, and how much that may be: so that no user keeps the others
// out. Rings need no count of their own, each session has MOECACHED_MAX_LANES of them. Pure. Thread: any.
#pragma once

#include <cstdint>

#include "daemon/base/result.h"
#include "daemon/config/config.h"

namespace moecached {

struct UserUse {
  std::uint64_t sessions = 0;
  std::uint64_t files =
      0;  // descriptors of the daemon: sockets, segments, shards. A shard once, however often it is open
  std::uint64_t bytes =
      0;  // slots, or pinned memory, of models that are open; shared ones as well, each once
};

// Of a session itself: socket, segment, doorbell, pidfd.
inline constexpr std::uint64_t kFilesOfSession = 4;
// Of an open model, beside its shards: the stream segment, or the log.
inline constexpr std::uint64_t kFilesOfOpen = 1;

// kLimit: it would be more than a limit, which the text names.
[[nodiscard]] Status check_user(std::uint32_t uid, const UserUse& would, const Config& config);
// What may be added to `use`.
[[nodiscard]] std::uint64_t user_bytes_left(const UserUse& use, const Config& config);

}  // namespace moecached
