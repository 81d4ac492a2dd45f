#include "daemon/platform/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "daemon/platform/memfd.h"

namespace moecached {
namespace {

class HugePagesTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<Memfd> memory =
        Memfd::create("huge", 4 * kHugePageBytes + 4096, ClientAccess::kReadOnlyReleasable);
    ASSERT_TRUE(memory) << memory.error().text;
    memory_ = std::move(memory).value();
  }
  Memfd memory_;
};

TEST_F(HugePagesTest, LargeSharedMemoryStartsWithAHugePage) {
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory_.bytes().data()) % kHugePageBytes, 0u);
}

TEST_F(HugePagesTest, AnExtentIsPopulatedWhenItIsFirstReachedAndItsBytesStay) {
  HugePages pages(memory_.bytes());
  std::byte* const at = memory_.bytes().data() + kHugePageBytes + 5;
  *at = std::byte{7};
  const std::string refused = pages.prepare(at, 1);
  if (!refused.empty()) GTEST_SKIP() << refused;
  const std::uint64_t backed = memory_.bytes_backed();
  if (backed < kHugePageBytes) GTEST_SKIP() << "no huge page to be had";
  EXPECT_EQ(backed, kHugePageBytes);
  EXPECT_EQ(*at, std::byte{7});
  EXPECT_EQ(pages.prepare(at, 1), "");
  EXPECT_EQ(memory_.bytes_backed(), backed);
  EXPECT_EQ(pages.prepare(at, 2 * kHugePageBytes), "");
  EXPECT_EQ(memory_.bytes_backed(), 3 * kHugePageBytes);
}

TEST_F(HugePagesTest, WhatIsNotAWholeExtentIsLeftAlone) {
  HugePages pages(memory_.bytes());
  EXPECT_EQ(pages.prepare(memory_.bytes().data() + 4 * kHugePageBytes, 4096), "");
  EXPECT_EQ(memory_.bytes_backed(), 0u);
  HugePages none(memory_.bytes().subspan(4096, kHugePageBytes));
  EXPECT_EQ(none.prepare(memory_.bytes().data() + 4096, kHugePageBytes), "");
  EXPECT_EQ(memory_.bytes_backed(), 0u);
  HugePages inner(memory_.bytes().subspan(4096, 2 * kHugePageBytes));
  (void)inner.prepare(memory_.bytes().data() + 4096, 4096);  // before the first extent
  EXPECT_EQ(memory_.bytes_backed(), 0u);
}

TEST_F(HugePagesTest, WithinALimitNoExtentAcrossItIsTouchedAndWhatIsGivenBackIsNewAgain) {
  HugePages pages(memory_.bytes());
  std::byte* const base = memory_.bytes().data();
  const std::span<std::byte> slot = memory_.bytes().subspan(kHugePageBytes / 2, 2 * kHugePageBytes);
  *slot.data() = std::byte{7};
  const std::string refused = pages.prepare(slot.data(), slot.size(), slot);
  if (!refused.empty()) GTEST_SKIP() << refused;
  if (memory_.bytes_backed() < kHugePageBytes) GTEST_SKIP() << "no huge page to be had";
  EXPECT_EQ(memory_.bytes_backed(), kHugePageBytes + 4096) << "extent 1, and the page of the first half";
  EXPECT_EQ(pages.prepare(slot.data(), slot.size(), slot), "");
  ASSERT_EQ(::madvise(base + kHugePageBytes, kHugePageBytes, MADV_REMOVE), 0);
  EXPECT_EQ(memory_.bytes_backed(), 4096u);
  pages.forget(slot);
  EXPECT_EQ(pages.prepare(slot.data(), slot.size(), slot), "");
  EXPECT_EQ(memory_.bytes_backed(), kHugePageBytes + 4096);
}

}  // namespace
}  // namespace moecached
