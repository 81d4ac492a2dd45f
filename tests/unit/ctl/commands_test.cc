// The commands against a real control server with a fake daemon behind it: exit codes and what is printed.
#include "client/ctl/commands.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "daemon/control/control_server.h"
#include "tests/unit/control/fake_daemon.h"

namespace moecached::ctl {
namespace {

using testing::HasSubstr;

class Commands : public testing::Test {
 protected:
  void SetUp() override {
    // A space and a percent sign: gRPC reads targets as URIs.
    char pattern[] = "/tmp/moecached ctl%41-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
    options_.socket = directory_ + "/control.sock";
    Result<std::unique_ptr<ControlServer>> server = ControlServer::start(options_, daemon_);
    ASSERT_TRUE(server) << server.error().text;
    server_ = *std::move(server);
    client_ = std::make_unique<ControlClient>(options_.socket, std::chrono::seconds(30));
  }
  void TearDown() override {
    server_.reset();
    ::rmdir(directory_.c_str());
  }
  template <typename Command>
  int run(Command command) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = command();
    out_ = testing::internal::GetCapturedStdout();
    error_ = testing::internal::GetCapturedStderr();
    return code;
  }

  std::string directory_, out_, error_;
  FakeDaemon daemon_;
  ControlServerOptions options_;
  std::unique_ptr<ControlServer> server_;
  std::unique_ptr<ControlClient> client_;
  const Output table_{.json = false}, json_{.json = true};
};

TEST_F(Commands, DoctorExitsWithOneOnlyForAnError) {
  daemon_.findings = {{"warning", "ssd", "slow"}};
  EXPECT_EQ(run([&] { return show_doctor(*client_, table_); }), kExitOk);
  EXPECT_THAT(out_, HasSubstr("slow"));
  daemon_.findings.push_back({"error", "model 1", "changed"});
  EXPECT_EQ(run([&] { return show_doctor(*client_, table_); }), kExitFinding);
  EXPECT_EQ(run([&] { return show_doctor(*client_, json_); }), kExitFinding);
  EXPECT_EQ(nlohmann::json::parse(out_)["findings"][1]["text"], "changed");
}

TEST_F(Commands, ARefusalIsFourWithTheDaemonsWords) {
  for (const FaultCode code : {FaultCode::kInvalid, FaultCode::kNotFound, FaultCode::kLimit,
                               FaultCode::kUnsupported, FaultCode::kChanged}) {
    daemon_.fault = Fault{code, "not today"};
    EXPECT_EQ(run([&] { return drop_model(*client_, table_, 3); }), kExitRefused);
    EXPECT_EQ(error_, "moecachectl: not today\n");
  }
}

TEST_F(Commands, AFailureOfTheDaemonIsSix) {
  daemon_.fault = Fault{FaultCode::kSystem, "broken"};
  EXPECT_EQ(run([&] { return drop_model(*client_, json_, 3); }), kExitInternal);
  EXPECT_EQ(nlohmann::json::parse(out_)["error"], "broken");
  EXPECT_EQ(nlohmann::json::parse(out_)["exit_code"], 6);
}

TEST_F(Commands, NoDaemonIsThreeAndVersionStillAnswers) {
  ControlClient nobody(directory_ + "/nobody.sock", std::chrono::seconds(30));
  EXPECT_EQ(run([&] { return show_status(nobody, table_); }), kExitNoDaemon);
  EXPECT_THAT(error_, HasSubstr("nobody.sock"));
  EXPECT_EQ(run([&] { return show_version(nobody, json_); }), kExitOk);
  EXPECT_TRUE(nlohmann::json::parse(out_)["moecached"].is_null());
}

TEST_F(Commands, ADaemonThatWentAwayIsThree) {
  EXPECT_EQ(run([&] { return show_status(*client_, table_); }), kExitOk);
  server_.reset();
  EXPECT_EQ(run([&] { return show_status(*client_, table_); }), kExitNoDaemon);
}

TEST_F(Commands, WatchingEndsAfterTheCountWithALineOfJsonEach) {
  EXPECT_EQ(run([&] { return watch_stats(*client_, json_, {.interval_seconds = 0.1, .count = 3}); }),
            kExitOk);
  int lines = 0;
  std::istringstream text(out_);
  for (std::string line; std::getline(text, line); ++lines)
    EXPECT_TRUE(nlohmann::json::parse(line).contains("total"));
  EXPECT_EQ(lines, 3);
}

TEST_F(Commands, RelativePathsAreMadeAbsoluteHere) {
  EXPECT_EQ(run([&] {
              return register_model(*client_, table_, {"a.gguf", "/b/../c.gguf"}, "GPU-1");
            }),
            kExitOk);
  ASSERT_EQ(daemon_.registered.size(), 2u);
  EXPECT_TRUE(daemon_.registered[0].starts_with("/") && daemon_.registered[0].ends_with("/a.gguf"));
  EXPECT_EQ(daemon_.registered[1], "/c.gguf");
  EXPECT_EQ(daemon_.registered_on, "GPU-1");
  EXPECT_EQ(out_, "model 9\n");
}

TEST_F(Commands, PolicyIsPrintedAsParsed) {
  EXPECT_EQ(run([&] { return get_policy(*client_, table_, 0); }), kExitOk);
  EXPECT_EQ(out_, "slru\n");
  EXPECT_EQ(run([&] { return set_policy(*client_, json_, 2, {"lru"}); }), kExitOk);
  EXPECT_EQ(nlohmann::json::parse(out_)["model"], 2);
  EXPECT_EQ(nlohmann::json::parse(out_)["spec"], "lru:parsed");
  EXPECT_EQ(daemon_.policy_tier, "");
  EXPECT_EQ(run([&] { return set_policy(*client_, table_, 0, {"gpu", "ewma"}); }), kExitOk);
  EXPECT_EQ(out_, "all models in gpu: ewma:parsed\n");
  EXPECT_EQ(daemon_.policy_tier, "gpu");
}

TEST_F(Commands, AllPoliciesAreListed) {
  daemon_.policy_reports = {{.tier = "ram", .model = 0, .name = {}, .device = {}, .spec = "slru"},
                            {.tier = "gpu", .model = 3, .name = "m", .device = "GPU-1", .spec = "ewma"}};
  EXPECT_EQ(run([&] { return list_policies(*client_, table_); }), kExitOk);
  EXPECT_NE(out_.find("new ones"), std::string::npos) << out_;
  EXPECT_NE(out_.find("GPU-1"), std::string::npos) << out_;
}

}  // namespace
}  // namespace moecached::ctl
