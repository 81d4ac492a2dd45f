// The file of a listening Unix socket: is somebody living behind it, may it be replaced, who may connect. Not
// the listener itself: gRPC binds, and unlinks whatever is there first, which is why these questions come
// before. Thread: main.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/base/result.h"

namespace moecached {

// Who accepts connections at `path`: "pid 123 (moecached)". Nothing when there is no file or nobody listens
// any more. kInvalid: the path is something other than a socket. kSystem: it cannot be told (no permission).
[[nodiscard]] Result<std::optional<std::string>> socket_owner(const std::string& path);

struct SocketAccess {
  std::uint32_t mode = 0660;
  std::string group;  // name or number; empty: unchanged
};

// Sets mode and group of a bound socket. kNotFound: no such group. kSystem: not permitted; the text says by
// what.
[[nodiscard]] Status apply_socket_access(const std::string& path, const SocketAccess& access);

}  // namespace moecached
