// The streams of Control.Route: each is a lane of the daemon, and a thread of gRPC's as long as it lasts.
// Messages are translated, and the lane is asked; one message of a client is held at a time, and none is read
// before the last one is answered, so that who does not read costs a stream and no memory. Thread: any.
// Memory: borrows the DaemonControl.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <mutex>
#include <set>

#include "daemon/ipc/daemon_control.h"
#include "proto/control/v1/control.grpc.pb.h"

namespace moecached {

class RouteStreams {
 public:
  using Stream = grpc::ServerReaderWriter<control::v1::RouteResponse, control::v1::RouteRequest>;

  RouteStreams(DaemonControl& daemon, std::uint32_t max_streams)
      : daemon_(daemon), max_streams_(max_streams) {}

  // Returns when the client ends the stream, breaks the protocol, or end() is called.
  [[nodiscard]] grpc::Status serve(grpc::ServerContext* context, Stream* stream);
  // No more begin, and those that there are end at once: a client that says nothing would hold its thread
  // until the deadline of a shutdown.
  void end();

 private:
  [[nodiscard]] grpc::Status route(const grpc::ServerContext& context, Stream* stream);
  [[nodiscard]] bool ending();

  DaemonControl& daemon_;
  const std::uint32_t max_streams_;  // 0: none are served
  std::mutex mutex_;
  std::set<grpc::ServerContext*> served_;  // guarded by mutex_, as is ending_
  bool ending_ = false;
};

}  // namespace moecached
