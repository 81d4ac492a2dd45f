#include "daemon/platform/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

class ModelFile : public testing::Test {
 protected:
  [[nodiscard]] UniqueFd open(int flags = O_RDONLY) const {
    return UniqueFd(::open(path_.c_str(), flags | O_CLOEXEC));
  }
  FileIdentity identity() {
    const Result<FileIdentity> now = file_identity(fd_.get());
    EXPECT_TRUE(now);
    return now ? *now : FileIdentity{};
  }
  TempFolder folder_;
  std::string path_ = folder_.write("model", std::string(20'000, 'm'));
  UniqueFd fd_ = open();
};

TEST_F(ModelFile, StaysTheSameWhenRenamedOrChmodded) {
  const FileIdentity before = identity();
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
  std::filesystem::rename(path_, folder_.file("other"));
  EXPECT_EQ(identity(), before);
}

TEST_F(ModelFile, IsAnotherWhenTouchedTruncatedOrGrown) {
  FileIdentity before = identity();
  const std::array<timespec, 2> times{timespec{0, UTIME_OMIT}, timespec{1'000'000, 1}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path_.c_str(), times.data(), 0), 0);
  EXPECT_NE(identity(), before);
  for (const off_t bytes : {10'000, 30'000}) {
    before = identity();
    ASSERT_EQ(::truncate(path_.c_str(), bytes), 0);
    EXPECT_NE(identity(), before);
  }
}

TEST_F(ModelFile, IsReadDirectlyWithoutTouchingTheGivenDescription) {
  const UniqueFd given(::dup(fd_.get()));
  Result<ReadableFile> file = open_for_reading(std::move(fd_), kAlignmentMax);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(::fcntl(given.get(), F_GETFL) & O_DIRECT, 0) << "the client's own reads would change";
  if (file->direct_alignment == 0) {
    EXPECT_NE(file->reason, "");
    GTEST_SKIP() << "this file system has no O_DIRECT: " << file->reason;
  }
  EXPECT_TRUE(std::has_single_bit(file->direct_alignment));
  EXPECT_NE(::fcntl(file->fd.get(), F_GETFL) & O_DIRECT, 0);
  const std::size_t n = file->direct_alignment;
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(n, n), &std::free);
  EXPECT_EQ(::pread(file->fd.get(), block.get(), n, 0), static_cast<ssize_t>(n));
  EXPECT_EQ(static_cast<const char*>(block.get())[0], 'm');
}

TEST_F(ModelFile, IsReadThroughThePageCacheWhenItsBlocksAreTooLarge) {
  const Result<ReadableFile> file = open_for_reading(std::move(fd_), 256);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->direct_alignment, 0u);
  EXPECT_NE(file->reason, "");
}

TEST_F(ModelFile, CanBeReadAtAnyOffsetWhenBufferedEvenIfOpenedWithODirect) {
  UniqueFd direct = open(O_RDONLY | O_DIRECT);
  if (!direct) GTEST_SKIP() << "this file system has no O_DIRECT";
  const Result<ReadableFile> file = open_for_reading(std::move(direct), 0);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->direct_alignment, 0u);
  EXPECT_EQ(file->reason, "") << "nobody asked for O_DIRECT";
  std::array<char, 7> bytes{};
  EXPECT_EQ(::pread(file->fd.get(), bytes.data(), bytes.size(), 1), 7);
}

TEST_F(ModelFile, KeepsItsContentsAfterItWasDeleted) {
  std::filesystem::remove(path_);
  const Result<ReadableFile> file = open_for_reading(std::move(fd_), 0);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->identity.bytes, 20'000u);
  char byte = 0;
  EXPECT_EQ(::pread(file->fd.get(), &byte, 1, 19'999), 1);
}

TEST_F(ModelFile, MustBeARegularFileOpenForReading) {
  std::array<int, 2> channel{};
  ASSERT_EQ(::pipe(channel.data()), 0);
  const UniqueFd other_end(channel[1]);
  std::array<UniqueFd, 4> bad{UniqueFd(channel[0]),
                              UniqueFd(::open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY)),
                              open(O_WRONLY), open(O_PATH)};
  for (UniqueFd& fd : bad) {
    ASSERT_TRUE(fd);
    const Result<ReadableFile> file = open_for_reading(std::move(fd), kAlignmentMax);
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().code, FaultCode::kInvalid) << file.error().text;
  }
}

}  // namespace
}  // namespace moecached
