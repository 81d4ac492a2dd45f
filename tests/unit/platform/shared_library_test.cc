#include "daemon/platform/shared_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace moecached {
namespace {

using std::filesystem::perm_options;
using std::filesystem::perms;
using ::testing::HasSubstr;

class SharedLibraryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/moecached-library-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    folder_ = pattern;
    std::filesystem::copy_file(MOECACHED_TEST_LIBRARY, folder_ / "good.so");
    std::filesystem::permissions(folder_ / "good.so", perms::group_write | perms::others_write,
                                 perm_options::remove);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string error_of(const std::string& name) {
    const auto library = SharedLibrary::open_trusted(folder_, name);
    return library ? "no error" : library.error().text;
  }
  std::filesystem::path folder_;
};

TEST_F(SharedLibraryTest, FindsWhatTheLibraryExports) {
  const auto library = SharedLibrary::open_trusted(folder_, "good");
  ASSERT_TRUE(library) << library.error().text;
  EXPECT_NE(library->symbol("moecached_policy_something_else"), nullptr);
  EXPECT_EQ(library->symbol("moecached_policy_entry"), nullptr);
}

TEST_F(SharedLibraryTest, WhatOthersCouldChangeIsRefused) {
  for (const perms who : {perms::group_write, perms::others_write}) {
    std::filesystem::permissions(folder_ / "good.so", who, perm_options::add);
    EXPECT_THAT(error_of("good"), HasSubstr("good.so can be written by others: chmod go-w"));
    std::filesystem::permissions(folder_ / "good.so", who, perm_options::remove);
    std::filesystem::permissions(folder_, who, perm_options::add);
    EXPECT_THAT(error_of("good"), HasSubstr(folder_.string() + " can be written by others"));
    std::filesystem::permissions(folder_, who, perm_options::remove);
  }
  EXPECT_EQ(error_of("good"), "no error");
  // A directory above: whoever can rename in it could exchange the whole folder. The sticky bit keeps them
  // from it.
  const auto inner = folder_ / "inner";
  std::filesystem::create_directory(inner);
  std::filesystem::rename(folder_ / "good.so", inner / "good.so");
  std::filesystem::permissions(folder_, perms::others_write, perm_options::add);
  EXPECT_FALSE(SharedLibrary::open_trusted(inner, "good"));
  std::filesystem::permissions(folder_, perms::sticky_bit, perm_options::add);
  EXPECT_TRUE(SharedLibrary::open_trusted(inner, "good"));
}

TEST_F(SharedLibraryTest, SomebodyElsesFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a file away";
  ASSERT_EQ(::chown((folder_ / "good.so").c_str(), 65534, 65534), 0);
  EXPECT_THAT(error_of("good"), HasSubstr("belongs to user 65534: it must belong to root"));
}

TEST_F(SharedLibraryTest, WhatIsNoLibraryIsRefused) {
  EXPECT_THAT(error_of("absent"), HasSubstr("absent.so: put the library there"));
  std::filesystem::create_symlink(folder_ / "good.so", folder_ / "link.so");
  EXPECT_THAT(error_of("link"), HasSubstr("is a link"));
  std::filesystem::create_directory(folder_ / "folder.so");
  EXPECT_THAT(error_of("folder"), HasSubstr("is not a file"));
  std::ofstream(folder_ / "text.so") << "this is no library";
  std::filesystem::permissions(folder_ / "text.so", perms::group_write | perms::others_write,
                               perm_options::remove);
  EXPECT_THAT(error_of("text"), HasSubstr("cannot load"));
  EXPECT_FALSE(SharedLibrary::open_trusted((folder_ / "nowhere").string(), "good"));
  EXPECT_FALSE(SharedLibrary::open_trusted((folder_ / "good.so").string(), "good"));
}

}  // namespace
}  // namespace moecached
