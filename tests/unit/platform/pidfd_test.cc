#include "daemon/platform/pidfd.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <array>

#include "daemon/platform/eventfd.h"

namespace moecached {
namespace {

// A child that lives until told to end.
class Child {
 public:
  Child() {
    EXPECT_EQ(::pipe(channel_.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(channel_[1]);
      char unused = 0;
      ::_exit(::read(channel_[0], &unused, 1) == 0 ? 0 : 1);
    }
    ::close(channel_[0]);
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  [[nodiscard]] pid_t pid() const { return pid_; }
  void let_go() {
    if (channel_[1] >= 0) ::close(channel_[1]);
    channel_[1] = -1;
  }
  void end() {
    let_go();
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  std::array<int, 2> channel_{-1, -1};
  pid_t pid_ = -1;
};

TEST(Pidfd, BecomesReadableWhenTheProcessEnds) {
  Child child;
  const Result<UniqueFd> fd = open_pidfd(child.pid());
  ASSERT_TRUE(fd) << fd.error().text;
  EXPECT_FALSE(process_exited(fd->get()));
  child.let_go();
  pollfd entry{fd->get(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 60'000), 1);
  EXPECT_TRUE(process_exited(fd->get()));
}

TEST(Pidfd, IsNotFoundForAProcessThatIsGoneOrNotVisible) {
  Child child;
  const pid_t pid = child.pid();
  child.end();
  const Result<UniqueFd> gone = open_pidfd(pid);
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, FaultCode::kNotFound);
  const Result<UniqueFd> hidden = open_pidfd(0);
  ASSERT_FALSE(hidden);
  EXPECT_EQ(hidden.error().code, FaultCode::kNotFound);
}

TEST(CheckPidfd, AcceptsAPidfdAndNamesItsProcess) {
  Child child;
  Result<UniqueFd> fd = open_pidfd(child.pid());
  ASSERT_TRUE(fd);
  Result<ReceivedPidfd> received = check_pidfd(std::move(fd).value());
  ASSERT_TRUE(received) << received.error().text;
  EXPECT_EQ(received->pid, child.pid());
  EXPECT_FALSE(process_exited(received->fd.get()));
}

TEST(CheckPidfd, RefusesEveryOtherDescriptor) {
  Result<EventFd> event = EventFd::create();
  ASSERT_TRUE(event);
  std::array<int, 2> channel{};
  ASSERT_EQ(::pipe(channel.data()), 0);
  ::close(channel[1]);
  for (const int fd : {::dup(event->fd()), channel[0]}) {
    const Result<ReceivedPidfd> received = check_pidfd(UniqueFd(fd));
    ASSERT_FALSE(received);
    EXPECT_EQ(received.error().code, FaultCode::kInvalid);
  }
}

}  // namespace
}  // namespace moecached
