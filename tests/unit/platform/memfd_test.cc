#include "daemon/platform/memfd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace moecached {
namespace {

constexpr std::uint64_t kBytes = 64u << 10;

TEST(Memfd, HasTheSizeAskedForAndIsZero) {
  const Result<Memfd> memory = Memfd::create("test", kBytes + 100, ClientAccess::kReadWrite);
  ASSERT_TRUE(memory) << memory.error().text;
  EXPECT_EQ(memory->bytes().size(), kBytes + 100);
  struct stat status {};
  ASSERT_EQ(::fstat(memory->fd(), &status), 0);
  EXPECT_EQ(status.st_size, static_cast<off_t>(kBytes + 100));
  for (const std::byte b : memory->bytes()) ASSERT_EQ(b, std::byte{0});
}

TEST(Memfd, IsCloseOnExec) {
  const Result<Memfd> memory = Memfd::create("test", kBytes, ClientAccess::kReadWrite);
  ASSERT_TRUE(memory);
  EXPECT_NE(::fcntl(memory->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Memfd, CanNeitherShrinkNorGrowNorGetMoreSeals) {
  for (const ClientAccess access :
       {ClientAccess::kReadOnly, ClientAccess::kReadOnlyReleasable, ClientAccess::kReadWrite}) {
    const Result<Memfd> memory = Memfd::create("test", kBytes, access);
    ASSERT_TRUE(memory);
    EXPECT_EQ(::ftruncate(memory->fd(), 0), -1);
    if (access == ClientAccess::kReadOnlyReleasable) continue;  // a descriptor for reading: refused as such
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(::ftruncate(memory->fd(), 2 * kBytes), -1);
    EXPECT_EQ(::fcntl(memory->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    EXPECT_EQ(errno, EPERM);
  }
}

TEST(Memfd, ReadOnlyForClientsIsStillWritableForItsMaker) {
  const Result<Memfd> memory = Memfd::create("test", kBytes, ClientAccess::kReadOnly);
  ASSERT_TRUE(memory) << memory.error().text;
  const Result<Mapping> writable = Mapping::map(memory->fd(), kBytes, ClientAccess::kReadWrite);
  ASSERT_FALSE(writable) << "a receiver could map it writable";
  const Result<Mapping> readable = Mapping::map(memory->fd(), kBytes, ClientAccess::kReadOnly);
  ASSERT_TRUE(readable) << readable.error().text;
  memory->bytes()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(readable->bytes()[kBytes - 1], std::byte{42});
  EXPECT_EQ(::pwrite(memory->fd(), "x", 1, 0), -1);
}

TEST(Memfd, ReadWriteForClientsIsShared) {
  const Result<Memfd> memory = Memfd::create("test", kBytes, ClientAccess::kReadWrite);
  ASSERT_TRUE(memory);
  const Result<Mapping> other = Mapping::map(memory->fd(), kBytes, ClientAccess::kReadWrite);
  ASSERT_TRUE(other) << other.error().text;
  other->bytes()[0] = std::byte{7};
  EXPECT_EQ(memory->bytes()[0], std::byte{7});
}

TEST(Memfd, CountsBackedBytesAsPagesAreTouched) {
  const Result<Memfd> memory = Memfd::create("test", kBytes, ClientAccess::kReadOnly);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->bytes_backed(), 0u);
  memory->bytes()[0] = std::byte{1};
  EXPECT_GE(memory->bytes_backed(), 4096u);
}

TEST(Memfd, NamesTheBytesWhenRefused) {
  const Result<Memfd> none = Memfd::create("nothing", 0, ClientAccess::kReadOnly);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, FaultCode::kInvalid);
  const std::uint64_t huge = std::uint64_t{1} << 60;
  const Result<Memfd> too_much = Memfd::create("huge", huge, ClientAccess::kReadOnly);
  ASSERT_FALSE(too_much);
  EXPECT_EQ(too_much.error().code, FaultCode::kLimit);
  EXPECT_NE(too_much.error().text.find(std::to_string(huge)), std::string::npos) << too_much.error().text;
  EXPECT_NE(too_much.error().text.find("huge"), std::string::npos) << too_much.error().text;
  const Result<Memfd> beyond = Memfd::create("beyond", ~std::uint64_t{0}, ClientAccess::kReadOnly);
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().code, FaultCode::kLimit);
}

TEST(Memfd, TakesLabelsOfAnyLength) {
  EXPECT_TRUE(Memfd::create(std::string(5000, 'x'), kBytes, ClientAccess::kReadOnly));
  EXPECT_TRUE(Memfd::create("", kBytes, ClientAccess::kReadOnly));
}

TEST(Memfd, GivesWholePagesBackAndClientsCanNeitherWriteNorDoSo) {
  Result<Memfd> memory = Memfd::create("test", kBytes, ClientAccess::kReadOnlyReleasable);
  ASSERT_TRUE(memory) << memory.error().text;
  const Result<Mapping> reader = Mapping::map(memory->fd(), kBytes, ClientAccess::kReadOnly);
  ASSERT_TRUE(reader) << reader.error().text;
  std::ranges::fill(memory->bytes(), std::byte{7});
  EXPECT_EQ(memory->bytes_backed(), kBytes);
  EXPECT_EQ(reader->bytes()[kBytes / 2], std::byte{7});
  ASSERT_TRUE(memory->release(4096 + 1, 3 * 4096)) << "parts of the first and the last page stay";
  EXPECT_EQ(memory->bytes_backed(), kBytes - 2 * 4096);
  EXPECT_EQ(memory->bytes()[2 * 4096 - 1], std::byte{7});
  EXPECT_EQ(reader->bytes()[2 * 4096], std::byte{0}) << "for who has mapped it as well";
  EXPECT_EQ(memory->bytes()[4 * 4096], std::byte{7});
  ASSERT_TRUE(memory->release(1, 4094)) << "no whole page: nothing to do";
  EXPECT_EQ(memory->bytes()[5], std::byte{7});
  memory->bytes()[2 * 4096] = std::byte{9};
  EXPECT_EQ(reader->bytes()[2 * 4096], std::byte{9}) << "and is the same memory when it is filled again";

  EXPECT_FALSE(Mapping::map(memory->fd(), kBytes, ClientAccess::kReadWrite));
  EXPECT_EQ(::pwrite(memory->fd(), "x", 1, 0), -1);
  EXPECT_EQ(::fallocate(memory->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  struct stat status {};
  ASSERT_EQ(::fstat(memory->fd(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0400u) << "nobody else may open it for writing";
}

}  // namespace
}  // namespace moecached
