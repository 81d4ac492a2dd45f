// The gRPC server of proto/control/v1 on a Unix socket. Handlers translate and ask the DaemonControl, nothing
// else; the server holds no state of the daemon. Also served: the gRPC health service, and reflection when
// asked for. Thread: start and stop from one thread (main); handlers run on gRPC's own threads, a bounded
// number. Memory: borrows the DaemonControl, which must outlive stop().
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "daemon/base/result.h"
#include "daemon/control/socket_file.h"
#include "daemon/ipc/daemon_control.h"

namespace moecached {

struct ControlServerOptions {
  std::string socket;  // absolute path, at most 107 bytes
  SocketAccess access;
  bool reflection = false;
  std::uint32_t max_threads = 24;  // of gRPC; a call beyond them is refused with RESOURCE_EXHAUSTED
  std::uint32_t max_watchers =
      12;  // WatchStats holds a thread each: fewer than max_threads, so that others get through
  std::uint32_t max_route_streams = 0;  // each has a thread of its own beyond max_threads; 0: Route is off
  std::uint32_t max_request_bytes = 1u << 20;
};

class ControlServer {
 public:
  // A socket file left by a dead daemon is replaced. kLimit: a living process listens there, and the text
  // names it.
  [[nodiscard]] static Result<std::unique_ptr<ControlServer>> start(const ControlServerOptions& options,
                                                                    DaemonControl& daemon);
  virtual ~ControlServer() = default;  // stops with no deadline to spare
  // Health says NOT_SERVING, watchers end, running calls get until the deadline, then are cancelled. The
  // socket file is gone afterwards. Returns when no handler runs any more. Calling it twice is harmless.
  virtual void stop(std::chrono::milliseconds deadline) = 0;
};

}  // namespace moecached
