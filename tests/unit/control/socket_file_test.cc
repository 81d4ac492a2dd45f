#include "daemon/control/socket_file.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "daemon/platform/fd.h"

namespace moecached {
namespace {

using testing::HasSubstr;

class SocketOwner : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/moecached-socket-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
    path_ = directory_ + "/s";
  }
  void TearDown() override {
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }
  UniqueFd bind(int type) {
    UniqueFd fd(::socket(AF_UNIX, type, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  std::string directory_, path_;
};

TEST_P(SocketOwner, AListenerIsNamedByItsPid) {
  const UniqueFd fd = bind(GetParam());
  ASSERT_EQ(::listen(fd.get(), 4), 0);
  const Result<std::optional<std::string>> owner = socket_owner(path_);
  ASSERT_TRUE(owner) << owner.error().text;
  ASSERT_TRUE(owner->has_value());
  EXPECT_THAT(**owner, HasSubstr("pid " + std::to_string(::getpid())));
}

TEST_P(SocketOwner, ASocketThatNobodyListensToHasNone) {
  const UniqueFd fd = bind(GetParam());
  const Result<std::optional<std::string>> owner = socket_owner(path_);
  ASSERT_TRUE(owner) << owner.error().text;
  EXPECT_FALSE(owner->has_value());
}

TEST_P(SocketOwner, AListenerWithAFullBacklogIsAlive) {
  const UniqueFd fd = bind(GetParam());
  ASSERT_EQ(::listen(fd.get(), 0), 0);
  std::optional<std::string> last;
  // The backlog of 0 holds one connection, which the probe itself leaves behind unaccepted.
  for (int i = 0; i < 3; ++i) {
    const Result<std::optional<std::string>> owner = socket_owner(path_);
    ASSERT_TRUE(owner) << owner.error().text;
    last = *owner;
    ASSERT_TRUE(last.has_value()) << i;
  }
  EXPECT_THAT(*last, HasSubstr("too busy"));
}

INSTANTIATE_TEST_SUITE_P(Types, SocketOwner, testing::Values(SOCK_STREAM, SOCK_SEQPACKET));

TEST(SocketOwnerOfNothing, IsNone) {
  const Result<std::optional<std::string>> owner = socket_owner("/nowhere/s");
  ASSERT_TRUE(owner) << owner.error().text;
  EXPECT_FALSE(owner->has_value());
}

TEST(SocketOwnerOfALongPath, IsInvalid) {
  const Result<std::optional<std::string>> owner = socket_owner("/" + std::string(107, 'x'));
  ASSERT_FALSE(owner);
  EXPECT_EQ(owner.error().code, FaultCode::kInvalid);
}

}  // namespace
}  // namespace moecached
