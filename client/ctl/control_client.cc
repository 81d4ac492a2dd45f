#include "client/ctl/control_client.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "proto/control/v1/control.grpc.pb.h"
#include "proto/control/v1/unix_target.h"

namespace moecached::ctl {
namespace {

using control::v1::Control;

constexpr int kResponseBytesMax = 64 << 20;

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

// Asked before gRPC is: its own message for all of these is "failed to connect to all addresses".
std::optional<Failure> probe(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return Failure{kExitUsage, path + ": too long for a socket path"};
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Failure{kExitInternal, std::string("cannot create a socket: ") + std::strerror(errno)};
  const int failed =
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
  ::close(fd);
  switch (failed) {
    case 0:
    case EAGAIN:
      return std::nullopt;  // EAGAIN: many wait already; gRPC waits too, up to the timeout
    case EACCES:
    case EPERM:
      return Failure{kExitRefused,
                     "not allowed to use " + path + ": join the group of the socket, or ask its owner"};
    case ENOENT:
      return Failure{kExitNoDaemon, "no daemon at " + path +
                                        ": the socket does not exist (start moecached, or give --socket)"};
    case ECONNREFUSED:
      return Failure{kExitNoDaemon, "no daemon at " + path + ": nobody listens there any more"};
    default:
      return Failure{kExitNoDaemon, "no daemon at " + path + ": " + std::strerror(failed)};
  }
}

Failure failure_of(const grpc::Status& status, const std::string& socket) {
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return {kExitRefused, status.error_message()};
    case grpc::StatusCode::UNAVAILABLE:
      return {kExitNoDaemon, "the daemon at " + socket + " went away: " + status.error_message()};
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::CANCELLED:
      return {kExitTimeout, "the daemon at " + socket + " did not answer in time (--timeout)"};
    case grpc::StatusCode::UNIMPLEMENTED:
      return {kExitInternal,
              "the daemon at " + socket + " does not know this command: is it older than this moecachectl?"};
    default:
      return {kExitInternal, status.error_message()};
  }
}

}  // namespace

std::string choose_control_socket(const std::string& given) {
  if (!given.empty()) return given;
  const char* variable = std::getenv("MOECACHED_CONTROL_SOCKET");
  if (variable != nullptr && *variable != '\0') return variable;
  const std::string system = "/run/moecached/control.sock";
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (!exists(system) && runtime != nullptr && *runtime != '\0') {
    std::string own = std::string(runtime) + "/moecached/control.sock";
    if (exists(own)) return own;
  }
  return system;
}

struct ControlClient::Connection {
  std::unique_ptr<Control::Stub> stub;
};

ControlClient::ControlClient(std::string socket, std::chrono::milliseconds timeout)
    : socket_(std::move(socket)), timeout_(timeout) {
  // What gRPC would print is said better by failure_of. Set before its first use, and not over the user's own
  // choice.
  ::setenv("GRPC_VERBOSITY", "NONE", 0);
}
ControlClient::~ControlClient() = default;

ControlClient::Failed ControlClient::connect() {
  if (connection_ != nullptr) return std::nullopt;
  if (Failed failed = probe(socket_)) return failed;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kResponseBytesMax);
  connection_ = std::make_unique<Connection>();
  connection_->stub = Control::NewStub(grpc::CreateCustomChannel(
      control::unix_target(socket_), grpc::InsecureChannelCredentials(), arguments));
  return std::nullopt;
}

template <typename Request, typename Response, typename Method>
ControlClient::Failed ControlClient::invoke(Method method, const Request& request, Response* response) {
  if (Failed failed = connect()) return failed;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout_);
  const grpc::Status status = ((*connection_->stub).*method)(&context, request, response);
  if (status.ok()) return std::nullopt;
  return failure_of(status, socket_);
}

ControlClient::Failed ControlClient::call(const control::v1::GetStatusRequest& q, control::v1::Status* a) {
  return invoke(&Control::Stub::GetStatus, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::ListModelsRequest& q,
                                          control::v1::ListModelsResponse* a) {
  return invoke(&Control::Stub::ListModels, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::ListSessionsRequest& q,
                                          control::v1::ListSessionsResponse* a) {
  return invoke(&Control::Stub::ListSessions, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::GetStatsRequest& q, control::v1::Stats* a) {
  return invoke(&Control::Stub::GetStats, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::DoctorRequest& q,
                                          control::v1::DoctorResponse* a) {
  return invoke(&Control::Stub::Doctor, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::GetPolicyRequest& q, control::v1::Policy* a) {
  return invoke(&Control::Stub::GetPolicy, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::SetPolicyRequest& q, control::v1::Policy* a) {
  return invoke(&Control::Stub::SetPolicy, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::ListPoliciesRequest& q,
                                          control::v1::ListPoliciesResponse* a) {
  return invoke(&Control::Stub::ListPolicies, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::RegisterModelRequest& q,
                                          control::v1::RegisterModelResponse* a) {
  return invoke(&Control::Stub::RegisterModel, q, a);
}
ControlClient::Failed ControlClient::call(const control::v1::DropModelRequest& q,
                                          control::v1::DropModelResponse* a) {
  return invoke(&Control::Stub::DropModel, q, a);
}

ControlClient::Failed ControlClient::call(const control::v1::ShadowPoliciesRequest& q,
                                          control::v1::ShadowPoliciesResponse* a) {
  return invoke(&Control::Stub::ShadowPolicies, q, a);
}

ControlClient::Failed ControlClient::call(const control::v1::ComparePoliciesRequest& q,
                                          control::v1::PolicyComparison* a) {
  return invoke(&Control::Stub::ComparePolicies, q, a);
}

ControlClient::Failed ControlClient::call(const control::v1::PrewarmRequest& q,
                                          control::v1::PrewarmResponse* a) {
  return invoke(&Control::Stub::Prewarm, q, a);
}

ControlClient::Failed ControlClient::watch(
    const control::v1::WatchStatsRequest& request,
    const std::function<bool(const control::v1::Stats&)>& on_snapshot) {
  if (Failed failed = connect()) return failed;
  grpc::ClientContext context;
  const auto reader = connection_->stub->WatchStats(&context, request);
  control::v1::Stats snapshot;
  while (reader->Read(&snapshot)) {
    if (!on_snapshot(snapshot)) {
      context.TryCancel();
      (void)reader->Finish();  // CANCELLED, which is what was wanted
      return std::nullopt;
    }
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) return Failure{kExitNoDaemon, "the daemon at " + socket_ + " ended the stream"};
  return failure_of(status, socket_);
}

ControlClient::Failed ControlClient::record(
    const control::v1::RecordRoutingRequest& request,
    const std::function<bool(const control::v1::RoutingChunk&)>& on_chunk) {
  if (Failed failed = connect()) return failed;
  grpc::ClientContext context;
  const auto reader = connection_->stub->RecordRouting(&context, request);
  control::v1::RoutingChunk chunk;
  while (reader->Read(&chunk)) {
    if (!on_chunk(chunk)) {
      context.TryCancel();
      (void)reader->Finish();  // CANCELLED, which is what was wanted
      return std::nullopt;
    }
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) return std::nullopt;
  return failure_of(status, socket_);
}

}  // namespace moecached::ctl
