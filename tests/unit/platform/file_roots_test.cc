#include "daemon/platform/file_roots.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

namespace fs = std::filesystem;

class FileRootsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* folder : {"root", "root/below", "other"}) fs::create_directory(folder_.file(folder));
    write("root/below/model");
    write("other/model");
    auto roots = FileRoots::open(folder_.file("root"));
    ASSERT_TRUE(roots) << roots.error().text;
    roots_ = *std::move(roots);
  }
  void write(const char* name) const { std::ofstream(folder_.file(name)) << name; }
  [[nodiscard]] UniqueFd opened(const char* name) const {
    UniqueFd fd(::open(folder_.file(name).c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_TRUE(fd) << name;
    return fd;
  }
  [[nodiscard]] bool allowed(const char* name) const { return roots_.check(opened(name).get()).has_value(); }

  const TempFolder folder_;
  FileRoots roots_;
};

TEST_F(FileRootsTest, AFileInOrDeepBelowARootIsAllowedAndNoOther) {
  write("root/model");
  EXPECT_TRUE(allowed("root/model"));
  EXPECT_TRUE(allowed("root/below/model"));
  EXPECT_FALSE(allowed("other/model"));
  fs::create_directory(folder_.file("root-too"));
  write("root-too/model");
  EXPECT_FALSE(allowed("root-too/model"));
}

TEST_F(FileRootsTest, ALinkInARootAllowsNothingOutside) {
  fs::create_symlink(folder_.file("other/model"), folder_.file("root/link"));
  EXPECT_FALSE(allowed("root/link"));
  fs::create_directory_symlink(folder_.file("other"), folder_.file("root/folder"));
  EXPECT_FALSE(allowed("root/folder/model"));
  // And one from outside leads to a file that is allowed.
  fs::create_symlink(folder_.file("root/below/model"), folder_.file("other/link"));
  EXPECT_TRUE(allowed("other/link"));
}

TEST_F(FileRootsTest, AFileThatHasGoneFromItsPathIsNotAllowed) {
  const UniqueFd fd = opened("root/below/model");
  fs::rename(folder_.file("root/below/model"), folder_.file("other/moved"));
  EXPECT_FALSE(roots_.check(fd.get()));
  fs::rename(folder_.file("other/moved"), folder_.file("root/below/model"));
  EXPECT_TRUE(roots_.check(fd.get()));
  fs::remove(folder_.file("root/below/model"));
  EXPECT_FALSE(roots_.check(fd.get()));
  // Even if its old path, and what the kernel calls it now, are other files.
  write("root/below/model");
  write("root/below/model (deleted)");
  EXPECT_FALSE(roots_.check(fd.get()));
}

TEST_F(FileRootsTest, WhatHasNoPathIsNotAllowed) {
  const UniqueFd memory(::memfd_create("root", MFD_CLOEXEC));
  EXPECT_FALSE(roots_.check(memory.get()));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd reading(ends[0]), writing(ends[1]);
  EXPECT_FALSE(roots_.check(reading.get()));
  EXPECT_FALSE(roots_.check(-1));
}

TEST_F(FileRootsTest, ARootIsTheFolderThatWasOpenedWhateverItIsCalled) {
  fs::rename(folder_.file("root"), folder_.file("renamed"));
  EXPECT_TRUE(allowed("renamed/below/model"));
  fs::create_directory(folder_.file("root"));
  write("root/model");
  EXPECT_FALSE(allowed("root/model"));
}

TEST_F(FileRootsTest, SeveralRootsNoneAndOneThatIsNotThere) {
  auto both = FileRoots::open(folder_.file("root") + ":" + folder_.file("other"));
  ASSERT_TRUE(both);
  EXPECT_TRUE(both->check(opened("other/model").get()));
  EXPECT_TRUE(both->check(opened("root/below/model").get()));
  auto none = FileRoots::open("");
  ASSERT_TRUE(none);
  EXPECT_FALSE(none->any());
  EXPECT_TRUE(none->check(opened("other/model").get()));
  auto everything = FileRoots::open("/");
  ASSERT_TRUE(everything);
  EXPECT_TRUE(everything->check(opened("other/model").get()));
  EXPECT_THAT(FileRoots::open(folder_.file("absent")).error().text, testing::HasSubstr("absent"));
}

}  // namespace
}  // namespace moecached
