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

}  // namespace
}  // namespace moecached
