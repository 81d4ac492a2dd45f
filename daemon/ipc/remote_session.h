// The session of a stream: the daemon's own, on behalf of a client that it knows by a stream alone. Hangs up
// when it goes, as a client's socket does. Thread: any, one at a time; the core loop must be running until it
// is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/ipc/core.h"
#include "daemon/ipc/session.h"

namespace moecached {

class RemoteSession {
 public:
  // kLimit. label: any bytes.
  static Result<std::unique_ptr<RemoteSession>> add(Core& core, std::uint64_t boot_epoch,
                                                    const std::string& label);
  ~RemoteSession();
  RemoteSession(const RemoteSession&) = delete;
  RemoteSession& operator=(const RemoteSession&) = delete;

  [[nodiscard]] Core& core() { return core_; }
  [[nodiscard]] Session& session() { return *session_; }
  [[nodiscard]] SessionId id() const { return session_->id(); }
  // Does not hang up: the core loop keeps the session, and what its lane is in, until it stops.
  void leave_open() { left_open_ = true; }
  [[nodiscard]] bool is_left_open() const { return left_open_; }

 private:
  RemoteSession(Core& core, std::shared_ptr<Session> session) : core_(core), session_(std::move(session)) {}
  Core& core_;
  const std::shared_ptr<Session> session_;
  bool left_open_ = false;
};

}  // namespace moecached
