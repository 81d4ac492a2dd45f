#include <gtest/gtest.h>

#include <vector>

#include "daemon/platform/device.h"
#include "daemon/platform/memory_info.h"

namespace moecached {
namespace {

TEST(HostDevice, BacksNothingUntilSlotsAreFilled) {
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> pool = device->create_pool("sparse", 64u << 20);
  ASSERT_TRUE(pool) << pool.error().text;
  EXPECT_EQ((*pool)->bytes_backed(), 0u);
  const std::vector<std::byte> one_page(4096, std::byte{1});
  ASSERT_TRUE((*pool)->write(32u << 20, one_page));
  EXPECT_GE((*pool)->bytes_backed(), 4096u);
  EXPECT_LE((*pool)->bytes_backed(), 2u << 20) << "one page, or one huge page";
}

TEST(HostDevice, CountsWhatOtherPoolsWerePromised) {
  const Result<MemoryInfo> info = read_memory_info();
  ASSERT_TRUE(info);
  const std::uint64_t most = info->available_bytes / 4 * 3 / 4096 * 4096;
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> first = device->create_pool("first", most);
  ASSERT_TRUE(first) << first.error().text;
  Result<std::unique_ptr<Pool>> second = device->create_pool("second", most);
  ASSERT_FALSE(second) << "two pools of three quarters each do not fit, though neither uses a page yet";
  EXPECT_EQ(second.error().code, FaultCode::kLimit);
  EXPECT_NE(second.error().text.find("promised to other pools"), std::string::npos) << second.error().text;
  first->reset();
  EXPECT_TRUE(device->create_pool("third", most)) << "the promise ends with the pool";
}

TEST(HostDevice, ReadingGivesNoMemoryToWhatHasNone) {
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> pool = device->create_pool("sparse", 8u << 20);
  ASSERT_TRUE(pool) << pool.error().text;
  const std::vector<std::byte> written(4096, std::byte{7});
  ASSERT_TRUE((*pool)->write(4u << 20, written));
  const std::uint64_t backed = (*pool)->bytes_backed();
  std::vector<std::byte> read(8u << 20, std::byte{1});
  ASSERT_TRUE((*pool)->read(0, read));
  EXPECT_EQ(read[0], std::byte{0});
  EXPECT_EQ(read[4u << 20], std::byte{7});
  EXPECT_EQ((*pool)->bytes_backed(), backed);
  EXPECT_FALSE((*pool)->read((8u << 20) - 1, std::span(read).first(2))) << "out of range";
}

// More addresses than memory: what counts is the memory, and it comes and goes.
TEST(HostDevice, PromisesWhatMayBeBackedAndGivesItBack) {
  const Result<MemoryInfo> info = read_memory_info();
  ASSERT_TRUE(info);
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> pool = device->create_pool("traded", {4 * info->available_bytes, 8u << 20});
  ASSERT_TRUE(pool) << pool.error().text;
  EXPECT_EQ((*pool)->bytes(), 4 * info->available_bytes);
  EXPECT_EQ((*pool)->bytes_backed_max(), 8u << 20);
  const std::vector<std::byte> slot(1u << 20, std::byte{1});
  ASSERT_TRUE((*pool)->write(info->available_bytes, slot));
  const std::uint64_t backed = (*pool)->bytes_backed();
  EXPECT_GE(backed, slot.size());
  ASSERT_TRUE((*pool)->release(info->available_bytes, slot.size()));
  EXPECT_LE((*pool)->bytes_backed() + slot.size(), backed + 4096);
  EXPECT_FALSE((*pool)->release((*pool)->bytes(), 1)) << "out of range";
}

}  // namespace
}  // namespace moecached
