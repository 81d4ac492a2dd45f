#include "shim/ggml/session.h"

#include <gtest/gtest.h>

#include "shim/ggml/model.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::Session;

class SessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    reset_fake_daemon();
    install_mini_host();
    Session::instance().open();
  }
  TemporaryFolder folder_;
};

TEST_F(SessionTest, SharesAModelBetweenAllThatOpenItsFile) {
  const ExpertFile file(folder_.file("a.gguf"), 1, 3);
  const ExpertFile draft(folder_.file("b.gguf"), 1, 3);  // the same tensor names
  file.serve(2, 1 << 20);
  const auto first = Session::instance().model(file.path());
  EXPECT_EQ(Session::instance().model(file.path()), first);
  EXPECT_NE(Session::instance().model(draft.path()), first);
  EXPECT_NE(first, nullptr);
}

TEST_F(SessionTest, OpensAModelAgainThatWasClosed) {
  const ExpertFile file(folder_.file("a.gguf"), 1, 3);
  file.serve(2, 1 << 20);
  EXPECT_NE(Session::instance().model(file.path()), nullptr);
  EXPECT_EQ(fake_daemon().open_models, 0u);
  EXPECT_NE(Session::instance().model(file.path()), nullptr);
}

TEST_F(SessionTest, DoesNotMoveWindowsUnderARunningGraph) {
  const std::shared_lock running(Session::instance().graphs());
  fake_daemon().connected = false;
  Session::instance().before_graph();
  EXPECT_EQ(fake_daemon().reconnects, 0u);
}

TEST_F(SessionTest, ReconnectsBeforeAGraphOnlyWhenTheDaemonIsGone) {
  Session::instance().before_graph();
  EXPECT_EQ(fake_daemon().reconnects, 0u);
  fake_daemon().connected = false;
  Session::instance().before_graph();
  EXPECT_EQ(fake_daemon().reconnects, 1u);
}

}  // namespace
}  // namespace moecached::testing
