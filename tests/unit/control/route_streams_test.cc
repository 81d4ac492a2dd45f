#include "daemon/control/route_streams.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <thread>

#include "daemon/control/control_server.h"
#include "tests/unit/control/fake_daemon.h"

namespace moecached {
namespace {

using control::v1::Control;
using control::v1::RouteRequest;
using control::v1::RouteResponse;
using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace std::chrono_literals;

class RouteStreamsTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/moecached-route-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
    options_.socket = directory_ + "/control.sock";
    options_.max_route_streams = 2;
  }
  void TearDown() override {
    server_.reset();
    ::rmdir(directory_.c_str());
  }
  void start() {
    Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
    ASSERT_TRUE(server) << server.error().text;
    server_ = *std::move(server);
    stub_ =
        Control::NewStub(grpc::CreateChannel("unix:" + options_.socket, grpc::InsecureChannelCredentials()));
  }

  struct Stream {
    explicit Stream(Control::Stub& stub) {
      context.set_deadline(std::chrono::system_clock::now() + 30s);
      calls = stub.Route(&context);
    }
    // Whether there was an answer, which is in `response`.
    bool ask(const RouteRequest& request) { return calls->Write(request) && calls->Read(&response); }
    bool open(std::uint32_t model = 0) {
      RouteRequest request;
      request.mutable_open()->set_model(model);
      request.mutable_open()->set_label("l");
      return ask(request);
    }
    bool decide(std::uint32_t layer, std::initializer_list<std::uint32_t> experts) {
      RouteRequest request;
      request.mutable_decision()->set_sequence(++sequence);
      request.mutable_decision()->set_layer(layer);
      for (const std::uint32_t expert : experts) request.mutable_decision()->add_experts(expert);
      return ask(request);
    }
    grpc::Status finish() {
      calls->WritesDone();
      while (calls->Read(&response)) continue;
      return calls->Finish();
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<RouteRequest, RouteResponse>> calls;
    RouteResponse response;
    std::uint64_t sequence = 0;
  };

  std::string directory_;
  FakeDaemon daemon_;
  ControlServerOptions options_;
  std::unique_ptr<ControlServer> server_;
  std::unique_ptr<Control::Stub> stub_;
};

TEST_F(RouteStreamsTest, OpensThenAnswersDecisionByDecision) {
  start();
  Stream stream(*stub_);
  ASSERT_TRUE(stream.open(4));
  EXPECT_EQ(stream.response.geometry().name(), "m");
  EXPECT_EQ(stream.response.geometry().ids_max(), kRouteIdsMax);
  EXPECT_EQ(stream.response.geometry().layers(0).block(), 7u);
  EXPECT_FALSE(stream.response.geometry().has_pool());
  EXPECT_EQ(daemon_.route_opened.model, 4u);
  EXPECT_EQ(daemon_.route_opened.label, "l");
  EXPECT_EQ(daemon_.route_opened.memory, RouteMemory::kNone);
  ASSERT_TRUE(stream.decide(0, {2, 0}));
  EXPECT_EQ(stream.response.slots().sequence(), 1u);
  EXPECT_THAT(stream.response.slots().slots(), ElementsAre(1, 3));
  ASSERT_EQ(stream.response.slots().changed_size(), 2);
  EXPECT_EQ(stream.response.slots().changed(0).expert(), 2u);
  EXPECT_EQ(stream.response.slots().changed(0).slot(), 1);
  RouteRequest release;
  release.mutable_release();
  ASSERT_TRUE(stream.calls->Write(release));
  ASSERT_TRUE(stream.decide(0, {1}));
  EXPECT_EQ(daemon_.releases, 1);
  EXPECT_THAT(stream.response.slots().slots(), ElementsAre(2)) << "and nothing of the answer before";
  EXPECT_TRUE(stream.finish().ok());
  EXPECT_EQ(daemon_.lanes_closed, 1);
}

TEST_F(RouteStreamsTest, ADecisionThatIsRefusedDoesNotEndTheStream) {
  start();
  Stream stream(*stub_);
  ASSERT_TRUE(stream.open());
  ASSERT_TRUE(stream.decide(9, {1}));
  EXPECT_EQ(stream.response.refused().sequence(), 1u);
  EXPECT_EQ(stream.response.refused().code(), static_cast<std::uint32_t>(StatusCode::INVALID_ARGUMENT));
  EXPECT_EQ(stream.response.refused().text(), "no such layer");
  ASSERT_TRUE(stream.decide(0, {1}));
  EXPECT_EQ(stream.response.slots().sequence(), 2u);
}

TEST_F(RouteStreamsTest, MessagesOutOfOrderEndTheStreamWithASentence) {
  start();
  Stream first(*stub_), second(*stub_);
  EXPECT_FALSE(first.decide(0, {1}));
  grpc::Status status = first.finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("begins with open"));
  ASSERT_TRUE(second.open());
  EXPECT_FALSE(second.open());
  status = second.finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("once"));

  Stream third(*stub_), fourth(*stub_);
  ASSERT_TRUE(third.open());
  EXPECT_FALSE(third.ask(RouteRequest()));
  EXPECT_EQ(third.finish().error_code(), StatusCode::INVALID_ARGUMENT);
  RouteRequest unknown;
  unknown.mutable_open()->set_memory(static_cast<control::v1::RouteMemory>(77));
  EXPECT_FALSE(fourth.ask(unknown));
  status = fourth.finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("memory 77"));
}

TEST_F(RouteStreamsTest, WhatTheDaemonRefusesToOpenIsTold) {
  daemon_.fault = Fault{FaultCode::kNotFound, "no model 3"};
  start();
  Stream stream(*stub_);
  EXPECT_FALSE(stream.open(3));
  const grpc::Status status = stream.finish();
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no model 3");
}

TEST_F(RouteStreamsTest, OffItSaysHowToSwitchItOn) {
  options_.max_route_streams = 0;
  start();
  Stream stream(*stub_);
  EXPECT_FALSE(stream.open());
  const grpc::Status status = stream.finish();
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("[control] route = true"));
}

TEST_F(RouteStreamsTest, OneTooManyIsToldTheLimitUntilAnotherEnds) {
  start();
  Stream first(*stub_), second(*stub_), third(*stub_);
  ASSERT_TRUE(first.open());
  ASSERT_TRUE(second.open());
  EXPECT_FALSE(third.open());
  const grpc::Status status = third.finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("limits.route_streams = 2"));
  EXPECT_TRUE(first.finish().ok());
  Stream fourth(*stub_);
  EXPECT_TRUE(fourth.open());
}

TEST_F(RouteStreamsTest, AClientThatCancelsWhileItWaitsLeavesItsLaneClosed) {
  start();
  Stream stream(*stub_);
  ASSERT_TRUE(stream.open());
  RouteRequest request;
  request.mutable_decision()->add_experts(3);
  ASSERT_TRUE(stream.calls->Write(request));
  while (!daemon_.waits_for_three) std::this_thread::yield();
  stream.context.TryCancel();
  EXPECT_EQ(stream.finish().error_code(), StatusCode::CANCELLED);
  while (daemon_.lanes_closed == 0) std::this_thread::yield();
  EXPECT_EQ(daemon_.lanes_left_open, 0);
}

TEST_F(RouteStreamsTest, StoppingEndsIdleAndWaitingStreamsAtOnceAndTakesNothingFromThem) {
  start();
  Stream idle(*stub_), waiting(*stub_);
  ASSERT_TRUE(idle.open());
  ASSERT_TRUE(waiting.open());
  RouteRequest request;
  request.mutable_decision()->add_experts(3);
  ASSERT_TRUE(waiting.calls->Write(request));
  while (!daemon_.waits_for_three) std::this_thread::yield();
  const auto begun = std::chrono::steady_clock::now();
  server_->stop(20s);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
  EXPECT_EQ(daemon_.lanes_left_open, 2);
  EXPECT_EQ(daemon_.lanes_closed, 0);
  EXPECT_FALSE(idle.finish().ok());
  EXPECT_FALSE(waiting.finish().ok());
}

}  // namespace
}  // namespace moecached
