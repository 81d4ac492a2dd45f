#include "daemon/ipc/user_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace moecached {
namespace {

Config limits() {
  Config config;
  config.max_user_sessions = 2;
  config.max_user_files = 20;
  config.max_user_bytes = 1000;
  return config;
}

TEST(UserLimits, WhatIsExactlyAllowedIsAllowed) {
  EXPECT_TRUE(check_user(1000, {.sessions = 2, .files = 20, .bytes = 1000}, limits()));
}

TEST(UserLimits, EachLimitIsNamedWithTheUserAndWhatItWouldBe) {
  const auto text = [](UserUse would) { return check_user(1000, would, limits()).error(); };
  EXPECT_EQ(text({.sessions = 3}).text, "user 1000 would have 3 sessions, limits.user_sessions = 2");
  EXPECT_EQ(text({.files = 21}).text, "user 1000 would have 21 descriptors, limits.user_files = 20");
  EXPECT_EQ(text({.bytes = 1001}).text,
            "user 1000 would have 1001 bytes of models, limits.user_bytes = 1000");
  EXPECT_EQ(text({.sessions = 3}).code, FaultCode::kLimit);
}

TEST(UserLimits, NoLimitOfBytesLeavesEverything) {
  Config config = limits();
  EXPECT_EQ(user_bytes_left({.bytes = 400}, config), 600u);
  EXPECT_EQ(user_bytes_left({.bytes = 4000}, config), 0u);
  config.max_user_bytes = 0;
  EXPECT_EQ(user_bytes_left({.bytes = 4000}, config), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(check_user(1000, {.bytes = ~std::uint64_t{0}}, config));
}

}  // namespace
}  // namespace moecached
