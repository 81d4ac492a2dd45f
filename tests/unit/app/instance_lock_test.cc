#include "daemon/app/instance_lock.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace moecached {
namespace {

class InstanceLockTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/moecached-lock-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
    path_ = directory_ + "/control.sock.lock";
  }
  void TearDown() override {
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }
  std::string directory_, path_, holder_;
};

TEST_F(InstanceLockTest, TheSecondIsToldWhoHoldsIt) {
  const auto first = InstanceLock::acquire(path_, &holder_);
  ASSERT_TRUE(first && first->has_value());
  const auto second = InstanceLock::acquire(path_, &holder_);
  ASSERT_TRUE(second) << second.error().text;
  EXPECT_FALSE(second->has_value());
  EXPECT_EQ(holder_, "pid " + std::to_string(::getpid()));
}

TEST_F(InstanceLockTest, IsFreeAgainWhenItsHolderIsGone) {
  {
    const auto first = InstanceLock::acquire(path_, &holder_);
    ASSERT_TRUE(first && first->has_value());
  }
  const auto second = InstanceLock::acquire(path_, &holder_);
  EXPECT_TRUE(second && second->has_value());
}

TEST_F(InstanceLockTest, ASymbolicLinkIsNotFollowed) {
  ASSERT_EQ(::symlink((directory_ + "/elsewhere").c_str(), path_.c_str()), 0);
  EXPECT_FALSE(InstanceLock::acquire(path_, &holder_));
  EXPECT_NE(::access((directory_ + "/elsewhere").c_str(), F_OK), 0);
}

TEST_F(InstanceLockTest, AMissingDirectoryIsAFault) {
  EXPECT_FALSE(InstanceLock::acquire(directory_ + "/missing/lock", &holder_));
}

}  // namespace
}  // namespace moecached
