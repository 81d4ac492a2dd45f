#include "client/ctl/child.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

namespace moecached::ctl {
namespace {

using namespace std::chrono_literals;

ChildOptions shell(const std::string& script) {
  return {.path = "/bin/sh", .arguments = {"sh", "-c", script}, .environment = {"PATH=/usr/bin:/bin"}};
}

int wait_for(Child& child) { return child.stop(60s); }  // patience far beyond what it takes

TEST(Child, ReturnsTheExitCode) {
  Child child;
  ASSERT_EQ(child.start(shell("exit 7")), 0);
  EXPECT_EQ(wait_for(child), 7);
  EXPECT_EQ(child.poll_exit(), 7) << "and keeps it";
}

TEST(Child, ReturnsTheSignalThatEndedIt) {
  Child child;
  ASSERT_EQ(child.start(shell("kill -TERM $$")), 0);
  EXPECT_EQ(wait_for(child), 128 + SIGTERM);
}

TEST(Child, AProgramThatCannotBeExecutedIsTheCallersError) {
  Child missing, directory;
  EXPECT_EQ(missing.start({.path = "/nowhere/x", .arguments = {"x"}, .environment = {}}), ENOENT);
  EXPECT_EQ(directory.start({.path = "/tmp", .arguments = {"x"}, .environment = {}}), EACCES);
  EXPECT_EQ(missing.pid(), -1);
}

TEST(Child, StopKillsOneThatDoesNotListen) {
  Child child;
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  ChildOptions options = shell("trap '' TERM; echo ready; exec sleep 1000");
  options.output_fd = ready[1];
  ASSERT_EQ(child.start(options), 0);
  char line[6];
  ASSERT_EQ(::read(ready[0], line, sizeof line), 6);  // the trap is set
  child.signal(SIGTERM);
  EXPECT_EQ(child.stop(1ms), 128 + SIGKILL);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Child, StartsWithNoSignalBlocked) {
  sigset_t set, before;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &set, &before);
  Child child;
  const int error = child.start(shell("kill -TERM $$; exit 3"));
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  ASSERT_EQ(error, 0);
  EXPECT_EQ(wait_for(child), 128 + SIGTERM);
}

TEST(Child, HasTheGivenEnvironmentAndOutputAlone) {
  int out[2];
  ASSERT_EQ(::pipe2(out, O_CLOEXEC), 0);
  Child child;
  ChildOptions options = shell("echo $A; echo error >&2; cat");
  options.environment = {"A=b", "PATH=/usr/bin:/bin"};
  options.output_fd = out[1];
  ASSERT_EQ(child.start(options), 0);
  EXPECT_EQ(wait_for(child), 0) << "its input is empty";
  ::close(out[1]);
  char text[64] = {};
  EXPECT_EQ(::read(out[0], text, sizeof text - 1), 8);
  EXPECT_STREQ(text, "b\nerror\n");
  ::close(out[0]);
}

TEST(Child, EndsWhenItsParentIsKilled) {
  // A pipe whose write end only the grandchild still holds says when it is gone.
  int alive[2], pids[2];
  ASSERT_EQ(::pipe(alive), 0);
  ASSERT_EQ(::pipe2(pids, O_CLOEXEC), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    ::close(alive[0]);
    ::fcntl(pids[0], F_SETFD, FD_CLOEXEC);
    Child child;
    if (child.start(shell("exec sleep 1000")) != 0) ::_exit(1);
    const pid_t pid = child.pid();
    ::close(alive[1]);
    if (::write(pids[1], &pid, sizeof pid) != sizeof pid) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  ::close(alive[1]);
  pid_t grandchild = -1;
  ASSERT_EQ(::read(pids[0], &grandchild, sizeof grandchild), static_cast<ssize_t>(sizeof grandchild));
  ASSERT_EQ(::kill(parent, SIGKILL), 0);
  char byte = 0;
  EXPECT_EQ(::read(alive[0], &byte, 1),
            0);  // end of file: it has ended; CTest's limit catches one that does not
  for (const int fd : {alive[0], pids[0], pids[1]}) ::close(fd);
}

}  // namespace
}  // namespace moecached::ctl
