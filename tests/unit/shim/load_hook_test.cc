#include "shim/ggml/load_hook.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "tests/unit/shim/import_probe.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::shim {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kBytes = 1024 * kKiB;
constexpr std::size_t kExpertBytes = 896 * kKiB;

// A field of the mapping that begins at an address, in KiB, from /proc/self/smaps.
long smaps_kib(const void* address, const std::string& field) {
  char begin[32];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(address));
  std::ifstream smaps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') != std::string::npos && line.find(':') > line.find(' '))
      here = line.starts_with(begin);
    if (here && line.starts_with(field + ":"))
      return std::strtol(line.c_str() + field.size() + 1, nullptr, 10);
  }
  return -1;
}

// The runtimes of the address and thread sanitizers turn mlock into a call that does nothing.
bool mlock_works() {
  void* page = mmap(nullptr, 4 * kKiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mlock(page, 4 * kKiB);
  const bool works = smaps_kib(page, "Locked") == 4;
  munmap(page, 4 * kKiB);
  return works;
}

class LoadHookTest : public ::testing::TestWithParam<const char*> {
 protected:
  LoadHookTest() : probe_(GetParam()) {}
  void SetUp() override { ASSERT_TRUE(install_load_hook()); }

  // A file of 1 MiB, its middle 896 KiB the experts if it has any.
  int make_file(const std::string& name, bool experts) {
    const std::string path = folder_.file(name);
    std::ofstream(path, std::ios::binary) << "GGUF" << std::string(kBytes - 4, 'x');
    testing::install_mini_host(
        {{experts ? "blk.0.ffn_up_exps.weight" : "blk.0.ffn_up.weight", 64 * kKiB, kExpertBytes}});
    return open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }

  testing::TemporaryFolder folder_;
  testing::ImportProbe probe_;
};

INSTANTIATE_TEST_SUITE_P(Bindings, LoadHookTest, ::testing::Values(IMPORT_PROBE_NOW, IMPORT_PROBE_LAZY));

TEST_P(LoadHookTest, DoesNotPopulateAModelWithExperts) {
  const int fd = make_file("experts.gguf", true);
  void* mapped = probe_.map(kBytes, MAP_SHARED | MAP_POPULATE, fd);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(smaps_kib(mapped, "Rss"), 0);
  EXPECT_EQ(static_cast<const char*>(mapped)[kBytes / 2], 'x');
  probe_.unmap(mapped, kBytes);
  close(fd);
}

TEST_P(LoadHookTest, PopulatesAModelWithoutExpertsAsAsked) {
  const int fd = make_file("dense.gguf", false);
  void* mapped = probe_.map(kBytes, MAP_SHARED | MAP_POPULATE, fd);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(smaps_kib(mapped, "Rss"), static_cast<long>(kBytes / kKiB));
  probe_.unmap(mapped, kBytes);
  close(fd);
}

TEST_P(LoadHookTest, LocksTheOtherTensorsOnly) {
  if (!mlock_works()) GTEST_SKIP() << "mlock does nothing in this program";
  const int fd = make_file("locked.gguf", true);
  void* mapped = probe_.map(kBytes, MAP_SHARED, fd);
  ASSERT_NE(mapped, MAP_FAILED);
  ASSERT_EQ(probe_.lock(mapped, kBytes), 0);
  EXPECT_EQ(probe_.advise(mapped, kBytes, POSIX_MADV_WILLNEED), 0);
  // The lock splits the mapping: its parts begin at the file's begin, the experts and the rest.
  const char* at = static_cast<const char*>(mapped);
  EXPECT_EQ(smaps_kib(at, "Locked"), 64);
  EXPECT_EQ(smaps_kib(at + 64 * kKiB, "Locked"), 0);
  EXPECT_EQ(smaps_kib(at + 64 * kKiB, "Rss"), 0);
  EXPECT_EQ(smaps_kib(at + 64 * kKiB + kExpertBytes, "Locked"), 64);
  probe_.unmap(mapped, kBytes);
  close(fd);
}

TEST_P(LoadHookTest, ForgetsAMappingWithItsUnmapping) {
  if (!mlock_works()) GTEST_SKIP() << "mlock does nothing in this program";
  const int fd = make_file("short.gguf", true);
  void* mapped = probe_.map(kBytes, MAP_SHARED, fd);
  ASSERT_EQ(probe_.unmap(mapped, kBytes), 0);
  close(fd);
  // The same addresses, now ordinary memory, are locked as a whole.
  void* memory =
      mmap(mapped, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  ASSERT_EQ(memory, mapped);
  ASSERT_EQ(probe_.lock(memory, kBytes), 0);
  EXPECT_EQ(smaps_kib(memory, "Locked"), static_cast<long>(kBytes / kKiB));
  munmap(memory, kBytes);
}

TEST(LoadHook, GivesMappedPagesBackButNotTheirNeighbours) {
  testing::TemporaryFolder folder;
  const std::string path = folder.file("data");
  std::ofstream(path) << std::string(kBytes, 'x');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* mapped = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
  close(fd);
  ASSERT_EQ(smaps_kib(mapped, "Rss"), static_cast<long>(kBytes / kKiB));
  release_mapped(static_cast<char*>(mapped) + 100, 8 * kKiB);
  EXPECT_EQ(smaps_kib(mapped, "Rss"), static_cast<long>(kBytes / kKiB) - 4);
  munmap(mapped, kBytes);
}

}  // namespace
}  // namespace moecached::shim
