#include "daemon/control/control_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "daemon/platform/fd.h"
#include "proto/control/v1/control.grpc.pb.h"
#include "tests/unit/control/fake_daemon.h"

namespace moecached {
namespace {

using control::v1::Control;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace std::chrono_literals;

class ControlServerTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/moecached-control-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
    options_.socket = directory_ + "/control.sock";
  }
  void TearDown() override {
    server_.reset();
    ::unlink(options_.socket.c_str());
    ::rmdir(directory_.c_str());
  }
  void start() {
    Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
    ASSERT_TRUE(server) << server.error().text;
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel("unix:" + options_.socket, grpc::InsecureChannelCredentials());
    stub_ = Control::NewStub(channel_);
  }
  template <typename Request, typename Response>
  grpc::Status call(grpc::Status (Control::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 30s);
    return (*stub_.*method)(&context, request, response);
  }
  grpc::Status get_status(control::v1::Status* out) {
    return call(&Control::Stub::GetStatus, control::v1::GetStatusRequest(), out);
  }

  // Health and reflection are standard services whose generated code is not ours to link. On the wire a unary
  // call is a stream of one message each way.
  grpc::Status raw_call(const char* method, const std::string& request, std::string* response) {
    const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::BIDI_STREAMING, channel_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 30s);
    const std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
        grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel_.get(),
                                                                                              rpc, &context));
    const grpc::Slice slice(request);
    stream->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions());
    for (grpc::ByteBuffer message; stream->Read(&message);) {
      std::vector<grpc::Slice> parts;
      if (!message.Dump(&parts).ok()) continue;
      for (const grpc::Slice& part : parts)
        response->append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
    return stream->Finish();
  }
  bool serves(const std::string& service) {
    std::string response;
    const std::string request =
        service.empty() ? "" : std::string("\x0a") + static_cast<char>(service.size()) + service;
    const grpc::Status status = raw_call("/grpc.health.v1.Health/Check", request, &response);
    return status.ok() && response == "\x08\x01";  // status: SERVING
  }

  std::string directory_;
  FakeDaemon daemon_;
  ControlServerOptions options_;
  std::unique_ptr<ControlServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<Control::Stub> stub_;
};

TEST_F(ControlServerTest, AnswersWithWhatTheDaemonReports) {
  daemon_.status_report.version = "1.2.3";
  daemon_.status_report.pid = 77;
  daemon_.model_reports.emplace_back().id = 4;
  daemon_.session_reports.emplace_back().label = "l";
  daemon_.findings = {{"warning", "ssd", "slow"}};
  start();
  control::v1::Status status;
  ASSERT_TRUE(get_status(&status).ok());
  EXPECT_EQ(status.version(), "1.2.3");
  EXPECT_EQ(status.pid(), 77u);
  control::v1::ListModelsResponse models;
  ASSERT_TRUE(call(&Control::Stub::ListModels, control::v1::ListModelsRequest(), &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).id(), 4u);
  control::v1::ListSessionsResponse sessions;
  ASSERT_TRUE(call(&Control::Stub::ListSessions, control::v1::ListSessionsRequest(), &sessions).ok());
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).label(), "l");
  control::v1::DoctorResponse doctor;
  ASSERT_TRUE(call(&Control::Stub::Doctor, control::v1::DoctorRequest(), &doctor).ok());
  ASSERT_EQ(doctor.findings_size(), 1);
  EXPECT_EQ(doctor.findings(0).text(), "slow");
}

TEST_F(ControlServerTest, PassesChangesOn) {
  start();
  control::v1::SetPolicyRequest set;
  set.set_model(3);
  set.set_spec("lru");
  set.set_tier("gpu");
  control::v1::Policy policy;
  ASSERT_TRUE(call(&Control::Stub::SetPolicy, set, &policy).ok());
  EXPECT_EQ(daemon_.policy_model, 3u);
  EXPECT_EQ(daemon_.policy_tier, "gpu");
  EXPECT_EQ(policy.spec(), "lru:parsed");

  control::v1::RegisterModelRequest paths;
  paths.add_paths("/a");
  paths.add_paths("/b");
  paths.set_device("GPU-1");
  control::v1::RegisterModelResponse registered;
  ASSERT_TRUE(call(&Control::Stub::RegisterModel, paths, &registered).ok());
  EXPECT_EQ(registered.model(), 9u);
  EXPECT_THAT(daemon_.registered, ElementsAre("/a", "/b"));
  EXPECT_EQ(daemon_.registered_on, "GPU-1");

  control::v1::ComparePoliciesRequest compare;
  compare.set_model(2);
  control::v1::PolicyComparison compared;
  EXPECT_EQ(call(&Control::Stub::ComparePolicies, compare, &compared).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  control::v1::ShadowPoliciesRequest shadow;
  shadow.add_specs("ewma");
  control::v1::ShadowPoliciesResponse shadowed;
  ASSERT_TRUE(call(&Control::Stub::ShadowPolicies, shadow, &shadowed).ok());
  EXPECT_EQ(shadowed.model(), 1u);
  EXPECT_THAT(daemon_.challengers, ElementsAre("ewma"));
  ASSERT_TRUE(call(&Control::Stub::ComparePolicies, compare, &compared).ok());
  EXPECT_THAT(compared.policies(), ElementsAre("slru", "ewma"));
  EXPECT_EQ(compared.layers(0).block(), 5u);
  EXPECT_EQ(compared.layers(0).belady_hits(), 90u);
  EXPECT_EQ(compared.layers(0).policies(1).covered(), 55u);
  EXPECT_THAT(compared.advice(), ElementsAre("take the other"));

  control::v1::PrewarmRequest prewarm;
  prewarm.set_path("counts");
  control::v1::PrewarmResponse prewarmed;
  EXPECT_EQ(call(&Control::Stub::Prewarm, prewarm, &prewarmed).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  prewarm.set_model(4);
  prewarm.set_path("/counts");
  ASSERT_TRUE(call(&Control::Stub::Prewarm, prewarm, &prewarmed).ok());
  EXPECT_EQ(prewarmed.model(), 4u);
  EXPECT_EQ(prewarmed.experts(), 24u);
  prewarm.set_path("/elsewhere");
  EXPECT_EQ(call(&Control::Stub::Prewarm, prewarm, &prewarmed).error_code(), grpc::StatusCode::NOT_FOUND);

  control::v1::DropModelRequest drop;
  drop.set_model(8);
  control::v1::DropModelResponse dropped;
  ASSERT_TRUE(call(&Control::Stub::DropModel, drop, &dropped).ok());
  EXPECT_EQ(daemon_.dropped, 8u);
}

TEST_F(ControlServerTest, ReadsThePolicyOfOneModelOrTheDefault) {
  daemon_.model_reports.emplace_back().id = 4;
  daemon_.model_reports.back().policy = "lru";
  start();
  control::v1::GetPolicyRequest request;
  control::v1::Policy policy;
  ASSERT_TRUE(call(&Control::Stub::GetPolicy, request, &policy).ok());
  EXPECT_EQ(policy.spec(), "slru");
  request.set_model(4);
  ASSERT_TRUE(call(&Control::Stub::GetPolicy, request, &policy).ok());
  EXPECT_EQ(policy.spec(), "lru");
  request.set_model(5);
  EXPECT_EQ(call(&Control::Stub::GetPolicy, request, &policy).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ControlServerTest, EveryFaultHasItsOwnCodeAndKeepsItsText) {
  start();
  const std::pair<FaultCode, grpc::StatusCode> table[] = {
      {FaultCode::kInvalid, grpc::StatusCode::INVALID_ARGUMENT},
      {FaultCode::kNotFound, grpc::StatusCode::NOT_FOUND},
      {FaultCode::kLimit, grpc::StatusCode::RESOURCE_EXHAUSTED},
      {FaultCode::kUnsupported, grpc::StatusCode::FAILED_PRECONDITION},
      {FaultCode::kSystem, grpc::StatusCode::INTERNAL},
      {FaultCode::kChanged, grpc::StatusCode::ABORTED}};
  for (const auto& [fault, code] : table) {
    daemon_.fault = Fault{fault, "because of this"};
    control::v1::DropModelResponse dropped;
    const grpc::Status status = call(&Control::Stub::DropModel, control::v1::DropModelRequest(), &dropped);
    EXPECT_EQ(status.error_code(), code);
    EXPECT_EQ(status.error_message(), "because of this");
  }
}

TEST_F(ControlServerTest, AModelFileThatCannotBeOpenedIsNoFailureOfTheDaemon) {
  daemon_.fault = Fault{FaultCode::kSystem, "open /a: No such file"};
  start();
  control::v1::RegisterModelRequest request;
  request.add_paths("/a");
  control::v1::RegisterModelResponse response;
  EXPECT_EQ(call(&Control::Stub::RegisterModel, request, &response).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ControlServerTest, OnlyAbsolutePathsReachTheDaemon) {
  start();
  control::v1::RegisterModelResponse response;
  EXPECT_EQ(call(&Control::Stub::RegisterModel, control::v1::RegisterModelRequest(), &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  for (const std::string& path : {std::string("model.gguf"), std::string(), std::string("/a\0b", 4)}) {
    control::v1::RegisterModelRequest request;
    request.add_paths("/fine");
    request.add_paths(path);
    EXPECT_EQ(call(&Control::Stub::RegisterModel, request, &response).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(daemon_.registered.empty());
}

TEST_F(ControlServerTest, AnExceptionEndsTheCallAndNotTheServer) {
  daemon_.status_throws = true;
  start();
  control::v1::Status status;
  const grpc::Status failed = get_status(&status);
  EXPECT_EQ(failed.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(failed.error_message(), "out of luck");
  daemon_.status_throws = false;
  EXPECT_TRUE(get_status(&status).ok());
}

TEST_F(ControlServerTest, ARequestLargerThanTheLimitIsRefused) {
  options_.max_request_bytes = 4096;
  start();
  control::v1::RegisterModelRequest request;
  request.add_paths("/" + std::string(8192, 'x'));
  control::v1::RegisterModelResponse response;
  EXPECT_EQ(call(&Control::Stub::RegisterModel, request, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(daemon_.registered.empty());
}

TEST_F(ControlServerTest, WatchersGetSnapshotsUntilTheyCancel) {
  daemon_.session_reports.resize(2);
  start();
  grpc::ClientContext context;
  control::v1::WatchStatsRequest request;
  request.set_interval_ms(100);
  const auto reader = stub_->WatchStats(&context, request);
  control::v1::Stats stats;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(reader->Read(&stats));
    EXPECT_EQ(stats.sessions(), 2u);
  }
  context.TryCancel();
  while (reader->Read(&stats)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ControlServerTest, AnIntervalOutsideOfItsBoundsIsRefused) {
  start();
  for (const std::uint32_t interval_ms : {99u, 3'600'001u}) {
    grpc::ClientContext context;
    control::v1::WatchStatsRequest request;
    request.set_interval_ms(interval_ms);
    const auto reader = stub_->WatchStats(&context, request);
    control::v1::Stats stats;
    EXPECT_FALSE(reader->Read(&stats));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("between 100 and 3600000"));
  }
}

TEST_F(ControlServerTest, WatchersBeyondTheLimitAreRefusedAndOtherCallsGetThrough) {
  options_.max_watchers = 2;
  start();
  control::v1::WatchStatsRequest request;
  request.set_interval_ms(3'600'000);
  grpc::ClientContext contexts[3];
  std::unique_ptr<grpc::ClientReader<control::v1::Stats>> readers[3];
  control::v1::Stats stats;
  for (int i = 0; i < 2; ++i) {
    readers[i] = stub_->WatchStats(&contexts[i], request);
    ASSERT_TRUE(readers[i]->Read(&stats));  // it is being served
  }
  readers[2] = stub_->WatchStats(&contexts[2], request);
  EXPECT_FALSE(readers[2]->Read(&stats));
  EXPECT_EQ(readers[2]->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  control::v1::Status status;
  EXPECT_TRUE(get_status(&status).ok());
  for (int i = 0; i < 2; ++i) contexts[i].TryCancel();
}

TEST_F(ControlServerTest, StoppingEndsWatchersAndRemovesTheSocket) {
  start();
  control::v1::WatchStatsRequest request;
  request.set_interval_ms(3'600'000);
  grpc::ClientContext context;
  const auto reader = stub_->WatchStats(&context, request);
  control::v1::Stats stats;
  ASSERT_TRUE(reader->Read(&stats));
  server_->stop(1h);  // far more than the test's time limit: the watcher must not hold it up
  EXPECT_FALSE(reader->Read(&stats));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_NE(::access(options_.socket.c_str(), F_OK), 0);
  server_->stop(0ms);
}

TEST_F(ControlServerTest, RecordingBeginsWithTheModelAndEndsWithTheReader) {
  daemon_.model_reports.resize(1);
  daemon_.model_reports[0].id = 3;
  daemon_.model_reports[0].layers.resize(2);
  for (std::uint32_t i = 0; i < 5000; ++i) {  // more than one chunk
    daemon_.routing.push_back({{.lane = 4, .graph = i, .layer = LayerIndex(i % 2), .token = 1, .n_tokens = 2},
                               {ExpertIndex(i % 64), ExpertIndex(64)}});
  }
  start();
  grpc::ClientContext context;
  const auto reader = stub_->RecordRouting(&context, control::v1::RecordRoutingRequest());
  control::v1::RoutingChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  EXPECT_EQ(chunk.model().id(), 3u);
  EXPECT_EQ(chunk.model().layers_size(), 2);
  std::uint64_t seen = 0;
  do {
    for (const control::v1::RoutingEvent& event : chunk.events()) {
      ASSERT_EQ(event.graph(), seen);
      ASSERT_EQ(event.layer(), seen % 2);
      ASSERT_THAT(event.experts(), ElementsAre(seen % 64, 64));
      ++seen;
    }
  } while (seen < 5000 && reader->Read(&chunk));
  EXPECT_EQ(seen, 5000u);
  EXPECT_EQ(chunk.dropped(), 0u);
  ASSERT_TRUE(reader->Read(&chunk));  // an empty one, which tells that there was nothing more
  EXPECT_TRUE(chunk.drained());
  EXPECT_FALSE(chunk.has_model());
  EXPECT_FALSE(daemon_.tap_closed);
  context.TryCancel();
  while (reader->Read(&chunk)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_->stop(30s);  // waits for the handler
  EXPECT_TRUE(daemon_.tap_closed);
}

TEST_F(ControlServerTest, ARecordingSaysWhatItLost) {
  daemon_.model_reports.resize(1);
  daemon_.tap_bytes = 512;
  for (int i = 0; i < 100; ++i) daemon_.routing.push_back({RoutingEvent{}, {ExpertIndex(1)}});
  start();
  grpc::ClientContext context;
  const auto reader = stub_->RecordRouting(&context, control::v1::RecordRoutingRequest());
  control::v1::RoutingChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  EXPECT_GT(chunk.events_size(), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(chunk.events_size()) + chunk.dropped(), 100u);
  context.TryCancel();
}

TEST_F(ControlServerTest, ARecordingThatCannotBeSaysWhy) {
  daemon_.fault = Fault{FaultCode::kInvalid, "there are several models"};
  start();
  grpc::ClientContext context;
  const auto reader = stub_->RecordRouting(&context, control::v1::RecordRoutingRequest());
  control::v1::RoutingChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("several models"));
}

TEST_F(ControlServerTest, StoppingEndsARecordingWithWhatThereIs) {
  daemon_.model_reports.resize(1);
  daemon_.routing.push_back({RoutingEvent{}, {ExpertIndex(1)}});
  start();
  grpc::ClientContext context;
  const auto reader = stub_->RecordRouting(&context, control::v1::RecordRoutingRequest());
  control::v1::RoutingChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  EXPECT_EQ(chunk.events_size(), 1);
  std::thread stopper([this] { server_->stop(60s); });
  while (reader->Read(&chunk)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  stopper.join();
}

TEST_F(ControlServerTest, TheHealthServiceSaysServing) {
  start();
  EXPECT_TRUE(serves(""));
  EXPECT_TRUE(serves("moecached.control.v1.Control"));
  EXPECT_FALSE(serves("moecached.control.v1.Other"));
}

TEST_F(ControlServerTest, ReflectionIsThereOnlyWhenAskedFor) {
  for (const bool wanted : {false, true}) {
    options_.reflection = wanted;
    start();
    std::string response;
    // list_services = "*"
    const grpc::Status status =
        raw_call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*", &response);
    EXPECT_EQ(status.error_code(), wanted ? grpc::StatusCode::OK : grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_EQ(response.find("moecached.control.v1.Control") != std::string::npos, wanted);
    server_.reset();
  }
}

TEST_F(ControlServerTest, TheSocketHasTheModeAndGroupOfTheConfiguration) {
  options_.access = {.mode = 0640, .group = std::to_string(::getegid())};
  start();
  struct stat status {};
  ASSERT_EQ(::stat(options_.socket.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
  EXPECT_EQ(status.st_gid, ::getegid());
}

TEST_F(ControlServerTest, AGroupThatDoesNotExistIsNamedAndNothingListens) {
  options_.access.group = "no-such-group-here";
  const Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
  ASSERT_FALSE(server);
  EXPECT_EQ(server.error().code, FaultCode::kNotFound);
  EXPECT_THAT(server.error().text, HasSubstr("no-such-group-here"));
  EXPECT_NE(::access(options_.socket.c_str(), F_OK), 0);
}

TEST_F(ControlServerTest, ALivingServerIsNamedAndGoesOnServing) {
  start();
  const Result<std::unique_ptr<ControlServer>> second = ControlServer::start(options_, daemon_);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, FaultCode::kLimit);
  EXPECT_THAT(second.error().text, HasSubstr("pid " + std::to_string(::getpid())));
  control::v1::Status status;
  EXPECT_TRUE(get_status(&status).ok());
}

TEST_F(ControlServerTest, AStaleSocketFileIsReplaced) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, options_.socket.c_str(), options_.socket.size() + 1);
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ASSERT_EQ(::access(options_.socket.c_str(), F_OK), 0);
  start();
  control::v1::Status status;
  EXPECT_TRUE(get_status(&status).ok());
}

TEST_F(ControlServerTest, AFileThatIsNoSocketIsNotTouched) {
  std::ofstream(options_.socket) << "precious";
  const Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
  ASSERT_FALSE(server);
  EXPECT_EQ(server.error().code, FaultCode::kInvalid);
  std::string text;
  std::ifstream(options_.socket) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(ControlServerTest, ADirectoryThatDoesNotExistIsSaid) {
  options_.socket = directory_ + "/missing/control.sock";
  const Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
  ASSERT_FALSE(server);
  EXPECT_THAT(server.error().text, HasSubstr(options_.socket));
}

}  // namespace
}  // namespace moecached
