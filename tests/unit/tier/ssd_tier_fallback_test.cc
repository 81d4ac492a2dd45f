// Where the kernel refuses: io_uring by a seccomp profile, registered buffers by RLIMIT_MEMLOCK. Both are
// arranged for one thread (what it starts inherits them), so that the rest of the program is left alone.
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstddef>
#include <thread>

#include "tests/unit/tier/tier_support.h"

namespace moecached {
namespace {

// io_uring_setup fails with EPERM on this thread from now on, as under a container's default profile.
bool refuse_io_uring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Root may lock as much as it likes; not on this thread.
bool drop_ipc_lock() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, data) == 0;
}

void read_something(SsdTier& tier) {
  const TempFolder folder;
  const ModelFile file(folder, "model", 500'000);
  const FileId id = add(tier, file);
  Memory memory(300'000);
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 20; ++i)
    requests.push_back(request_of(i, {{id, i * 20'001, 10'000, memory.data() + i * 10'000, false}}));
  for (const auto& [tag, result] : run(tier, requests)) {
    EXPECT_EQ(result, ReadResult::kOk);
    EXPECT_TRUE(file.equal(tag * 20'001, memory.data() + tag * 10'000, 10'000));
  }
}

TEST(SsdTierFallback, ReadsWithPreadAndSaysWhyWhenIoUringIsRefused) {
  std::thread([] {
    ASSERT_TRUE(refuse_io_uring());
    const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier({}));
    ASSERT_NE(tier, nullptr);
    read_something(*tier);
    const SsdStats stats = tier->stats();
    EXPECT_EQ(stats.engine, "pread");
    EXPECT_FALSE(stats.registered_buffers);
    EXPECT_NE(stats.fallback_reason.find("io_uring"), std::string::npos) << stats.fallback_reason;
    EXPECT_NE(stats.fallback_reason.find("seccomp"), std::string::npos) << stats.fallback_reason;
    EXPECT_LE(stats.depth_max, 16u);
  }).join();
}

TEST(SsdTierFallback, FaultsWhenIoUringIsInsistedOnAndRefused) {
  std::thread([] {
    ASSERT_TRUE(refuse_io_uring());
    SsdOptions options;
    options.engine = SsdEngine::kIoUring;
    const Result<std::unique_ptr<SsdTier>> tier = make_ssd_tier(options);
    ASSERT_FALSE(tier);
    EXPECT_EQ(tier.error().code, FaultCode::kSystem);
    EXPECT_NE(tier.error().text.find("io_uring"), std::string::npos) << tier.error().text;
  }).join();
}

TEST(SsdTierFallback, PreadThatWasAskedForIsNoFallback) {
  SsdOptions options;
  options.engine = SsdEngine::kPread;
  const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier(options));
  ASSERT_NE(tier, nullptr);
  EXPECT_EQ(tier->stats().engine, "pread");
  EXPECT_EQ(tier->stats().fallback_reason, "");
}

TEST(SsdTierFallback, ReadsUnregisteredAndSaysWhyWhenTooLittleMayBeLocked) {
  if (!has_io_uring()) GTEST_SKIP() << "io_uring is refused here";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const rlimit little{64u << 10, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &little), 0);
  std::thread([] {
    ASSERT_TRUE(drop_ipc_lock());
    const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier({}));
    ASSERT_NE(tier, nullptr);
    Memory region(1u << 20);
    tier->register_region(region.span());
    read_something(*tier);
    const SsdStats stats = tier->stats();
    EXPECT_EQ(stats.engine, "io_uring");
    EXPECT_FALSE(stats.registered_buffers);
    EXPECT_NE(stats.fallback_reason.find("MEMLOCK"), std::string::npos) << stats.fallback_reason;
    tier->unregister_region(region.span());
    EXPECT_FALSE(tier->stats().registered_buffers);
  }).join();
  EXPECT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

TEST(SsdTierFallback, RegistersBuffersWhereItMay) {
  if (!has_io_uring()) GTEST_SKIP() << "io_uring is refused here";
  SsdOptions options;
  options.queue_depth = 1;
  options.max_read_bytes = 4096;  // 4 KiB of staging: may be locked everywhere
  const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier(options));
  ASSERT_NE(tier, nullptr);
  EXPECT_TRUE(tier->stats().registered_buffers) << tier->stats().fallback_reason;
}

TEST(SsdTierFallback, ReadsEveryFileWhenFewDescriptorsMayBeOpen) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 128;  // fewer than the table of registered files would like
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  {
    const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier({}));
    if (tier != nullptr) read_something(*tier);
  }
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace moecached
