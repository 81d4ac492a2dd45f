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

}  // namespace
}  // namespace moecached
