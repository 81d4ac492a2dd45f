#include "daemon/config/default_paths.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

TEST(DefaultRuntimeDirectory, IsSystemdsFirst) {
  EXPECT_EQ(
      default_runtime_directory(
          {.runtime_directory = "/run/a:/run/b", .xdg_runtime_directory = "/run/user/7", .root = false}),
      "/run/a");
}

TEST(DefaultRuntimeDirectory, IsTheUsersOwnForAUser) {
  EXPECT_EQ(default_runtime_directory(
                {.runtime_directory = "", .xdg_runtime_directory = "/run/user/7", .root = false}),
            "/run/user/7/moecached");
}

TEST(DefaultRuntimeDirectory, IsTheSystemsForRootAndForAUserWithoutOne) {
  EXPECT_EQ(default_runtime_directory(
                {.runtime_directory = "", .xdg_runtime_directory = "/run/user/0", .root = true}),
            "/run/moecached");
  EXPECT_EQ(default_runtime_directory({.runtime_directory = "", .xdg_runtime_directory = "", .root = false}),
            "/run/moecached");
}

TEST(DefaultStateDirectory, IsSystemdsThenRootsThenTheUsersOwn) {
  EXPECT_EQ(default_state_directory({.runtime_directory = "",
                                     .xdg_runtime_directory = "",
                                     .root = true,
                                     .state_directory = "/var/lib/a:/var/lib/b",
                                     .home = "/root"}),
            "/var/lib/a");
  EXPECT_EQ(default_state_directory(
                {.runtime_directory = "", .xdg_runtime_directory = "", .root = true, .home = "/root"}),
            "/var/lib/moecached");
  EXPECT_EQ(default_state_directory({.runtime_directory = "",
                                     .xdg_runtime_directory = "",
                                     .root = false,
                                     .xdg_state_home = "/s",
                                     .home = "/h"}),
            "/s/moecached");
  EXPECT_EQ(default_state_directory(
                {.runtime_directory = "", .xdg_runtime_directory = "", .root = false, .home = "/h"}),
            "/h/.local/state/moecached");
  EXPECT_EQ(default_state_directory({.runtime_directory = "", .xdg_runtime_directory = "", .root = false}),
            "none");
}

}  // namespace
}  // namespace moecached
