// Calls of the control service, with gRPC kept out of this header. A call returns nothing on success, or the
// reason and the exit code that stands for it. Thread: one at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/ctl/exit_codes.h"
#include "proto/control/v1/control.pb.h"

namespace moecached::ctl {

// --socket, else $MOECACHED_CONTROL_SOCKET, else the first of /run/moecached and $XDG_RUNTIME_DIR/moecached
// that exists.
[[nodiscard]] std::string choose_control_socket(const std::string& given);

class ControlClient {
 public:
  ControlClient(std::string socket, std::chrono::milliseconds timeout);
  ~ControlClient();
  [[nodiscard]] const std::string& socket() const { return socket_; }

  using Failed = std::optional<Failure>;
  [[nodiscard]] Failed call(const control::v1::GetStatusRequest& request, control::v1::Status* response);
  [[nodiscard]] Failed call(const control::v1::ListModelsRequest& request,
                            control::v1::ListModelsResponse* response);
  [[nodiscard]] Failed call(const control::v1::ListSessionsRequest& request,
                            control::v1::ListSessionsResponse* response);
  [[nodiscard]] Failed call(const control::v1::GetStatsRequest& request, control::v1::Stats* response);
  [[nodiscard]] Failed call(const control::v1::DoctorRequest& request, control::v1::DoctorResponse* response);
  [[nodiscard]] Failed call(const control::v1::GetPolicyRequest& request, control::v1::Policy* response);
  [[nodiscard]] Failed call(const control::v1::SetPolicyRequest& request, control::v1::Policy* response);
  [[nodiscard]] Failed call(const control::v1::ListPoliciesRequest& request,
                            control::v1::ListPoliciesResponse* response);
  [[nodiscard]] Failed call(const control::v1::RegisterModelRequest& request,
                            control::v1::RegisterModelResponse* response);
  [[nodiscard]] Failed call(const control::v1::DropModelRequest& request,
                            control::v1::DropModelResponse* response);
  [[nodiscard]] Failed call(const control::v1::ShadowPoliciesRequest& request,
                            control::v1::ShadowPoliciesResponse* response);
  [[nodiscard]] Failed call(const control::v1::ComparePoliciesRequest& request,
                            control::v1::PolicyComparison* response);
  [[nodiscard]] Failed call(const control::v1::PrewarmRequest& request,
                            control::v1::PrewarmResponse* response);
  // Until `on_snapshot` says false, or the daemon ends the stream, which is a failure. Has no timeout.
  [[nodiscard]] Failed watch(const control::v1::WatchStatsRequest& request,
                             const std::function<bool(const control::v1::Stats&)>& on_snapshot);
  // The same for a recording. Returns nothing as well when the daemon ends it because it stops.
  [[nodiscard]] Failed record(const control::v1::RecordRoutingRequest& request,
                              const std::function<bool(const control::v1::RoutingChunk&)>& on_chunk);

 private:
  struct Connection;
  template <typename Request, typename Response, typename Method>
  [[nodiscard]] Failed invoke(Method method, const Request& request, Response* response);
  [[nodiscard]] Failed connect();
  const std::string socket_;
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<Connection> connection_;
};

}  // namespace moecached::ctl
