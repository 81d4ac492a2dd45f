#include "daemon/ipc/user_limits.h"

#include <limits>
#include <string>

namespace moecached {
namespace {

Fault too_much(std::uint32_t uid, std::uint64_t would, const char* what, const char* key,
               std::uint64_t limit) {
  return {FaultCode::kLimit, "user " + std::to_string(uid) + " would have " + std::to_string(would) + " " +
                                 what + ", limits." + key + " = " + std::to_string(limit)};
}

}  // namespace

Status check_user(std::uint32_t uid, const UserUse& would, const Config& config) {
  if (would.sessions > config.max_user_sessions)
    return too_much(uid, would.sessions, "sessions", "user_sessions", config.max_user_sessions);
  if (would.files > config.max_user_files)
    return too_much(uid, would.files, "descriptors", "user_files", config.max_user_files);
  if (config.max_user_bytes != 0 && would.bytes > config.max_user_bytes)
    return too_much(uid, would.bytes, "bytes of models", "user_bytes", config.max_user_bytes);
  return ok();
}

std::uint64_t user_bytes_left(const UserUse& use, const Config& config) {
  if (config.max_user_bytes == 0) return std::numeric_limits<std::uint64_t>::max();
  return config.max_user_bytes > use.bytes ? config.max_user_bytes - use.bytes : 0;
}

}  // namespace moecached
