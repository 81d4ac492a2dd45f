#include "daemon/platform/memory_info.h"

#include <gtest/gtest.h>

#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// 16 GiB, 12 of them available.
class MemoryInfoOf : public testing::Test {
 protected:
  MemoryInfoOf() {
    root_.write("proc/meminfo",
                "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\n"
                "CommitLimit:     9437184 kB\nCommitted_AS:    1048576 kB\n");
  }
  MemoryInfo read() {
    Result<MemoryInfo> info = read_memory_info(root_.path());
    if (!info) {
      ADD_FAILURE() << info.error().text;
      return {};
    }
    return *info;
  }
  TempFolder root_;
};

TEST_F(MemoryInfoOf, AMachineWithoutCgroupsIsItsMeminfo) {
  const MemoryInfo info = read();
  EXPECT_EQ(info.total_bytes, 16 * kGiB);
  EXPECT_EQ(info.available_bytes, 12 * kGiB);
  EXPECT_EQ(info.limited_by, "MemAvailable");
}

TEST_F(MemoryInfoOf, AV2GroupIsItsLimitLessWhatIsUsedAndNotPageCache) {
  root_.write("proc/self/cgroup", "0::/a/b\n");
  root_.write("sys/fs/cgroup/a/b/memory.max", "4294967296\n");
  root_.write("sys/fs/cgroup/a/b/memory.current", "3221225472\n");
  root_.write("sys/fs/cgroup/a/b/memory.stat",
              "anon 5\nfile 9\ninactive_file 536870912\nactive_file 536870912\n");
  const MemoryInfo info = read();
  EXPECT_EQ(info.total_bytes, 4 * kGiB);
  EXPECT_EQ(info.available_bytes, 2 * kGiB);
  EXPECT_EQ(info.limited_by, "/sys/fs/cgroup/a/b/memory.max");
}

TEST_F(MemoryInfoOf, AParentsLimitCountsToo) {
  root_.write("proc/self/cgroup", "0::/a/b\n");
  root_.write("sys/fs/cgroup/a/b/memory.max", "max\n");
  root_.write("sys/fs/cgroup/a/memory.max", "2147483648\n");
  root_.write("sys/fs/cgroup/a/memory.current", "1073741824\n");
  const MemoryInfo info = read();
  EXPECT_EQ(info.total_bytes, 2 * kGiB);
  EXPECT_EQ(info.available_bytes, 1 * kGiB);
  EXPECT_EQ(info.limited_by, "/sys/fs/cgroup/a/memory.max");
}

TEST_F(MemoryInfoOf, AContainerWhosePathIsNotInItsMountFindsTheMountsOwnLimit) {
  root_.write("proc/self/cgroup", "0::/kubepods/pod1/abc\n");
  root_.write("sys/fs/cgroup/memory.max", "1073741824\n");
  root_.write("sys/fs/cgroup/memory.current", "0\n");
  EXPECT_EQ(read().total_bytes, kGiB);
}

TEST_F(MemoryInfoOf, AV1GroupCountsAndItsNoLimitDoesNot) {
  root_.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n");
  root_.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root_.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8589934592\n");
  root_.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "2147483648\n");
  root_.write("sys/fs/cgroup/memory/job/memory.stat",
              "inactive_file 7\ntotal_inactive_file 1073741824\ntotal_active_file 0\n");
  const MemoryInfo info = read();
  EXPECT_EQ(info.total_bytes, 8 * kGiB);
  EXPECT_EQ(info.available_bytes, 7 * kGiB);
}

TEST_F(MemoryInfoOf, AGroupAboveItsLimitHasNothingLeft) {
  root_.write("proc/self/cgroup", "0::/a\n");
  root_.write("sys/fs/cgroup/a/memory.max", "1000000\n");
  root_.write("sys/fs/cgroup/a/memory.current", "2000000\n");
  EXPECT_EQ(read().available_bytes, 0u);
}

TEST_F(MemoryInfoOf, StrictOvercommitLimitsToTheCommitLimit) {
  root_.write("proc/sys/vm/overcommit_memory", "2\n");
  EXPECT_EQ(read().available_bytes, 8 * kGiB);
  root_.write("proc/sys/vm/overcommit_memory", "0\n");
  EXPECT_EQ(read().available_bytes, 12 * kGiB);
}

TEST(MemoryInfo, FaultsWithoutProc) {
  const TempFolder empty;
  EXPECT_FALSE(read_memory_info(empty.path()));
}

TEST(MemoryInfo, ReadsThisMachine) {
  const Result<MemoryInfo> info = read_memory_info();
  ASSERT_TRUE(info);
  EXPECT_GT(info->total_bytes, 0u);
  EXPECT_GT(info->available_bytes, 0u);
  EXPECT_EQ(machine_memory_bytes(), info->total_bytes);
}

TEST(BytesForPeople, GivesARoundNumberAndTheExactOne) {
  EXPECT_EQ(bytes_for_people(100), "100 bytes");
  EXPECT_EQ(bytes_for_people(1610612736), "1.50 GiB (1610612736 bytes)");
}

}  // namespace
}  // namespace moecached
