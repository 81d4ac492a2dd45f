// What every Device must do. A new device joins with one line in kDevices.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "daemon/platform/device.h"
#include "tests/conformance/device/client_view.h"

namespace moecached {
namespace {

struct DeviceUnderTest {
  const char* name;
  std::unique_ptr<Device> (*make)();
  ClientView client;
};
std::ostream& operator<<(std::ostream& out, const DeviceUnderTest& device) { return out << device.name; }

const DeviceUnderTest kDevices[] = {
    {"host", make_host_device, host_client},
};

constexpr std::uint64_t kPoolBytes = 4u << 20;

std::vector<std::byte> random_bytes(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

class DeviceConformance : public testing::TestWithParam<DeviceUnderTest> {
 protected:
  std::unique_ptr<Pool> make_pool(std::uint64_t bytes = kPoolBytes) {
    Result<std::unique_ptr<Pool>> pool = device_->create_pool("conformance", bytes);
    if (!pool) {
      ADD_FAILURE() << pool.error().text;
      return nullptr;
    }
    return std::move(pool).value();
  }
  std::unique_ptr<Device> device_ = GetParam().make();
};

// The child's complaint, empty if it had none.
std::string see_as_another_process(ClientView client, int fd, std::span<const std::byte> expected) {
  std::array<int, 2> channel{};
  EXPECT_EQ(::pipe(channel.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const char* const complaint = client(fd, expected);
    if (complaint != nullptr && ::write(channel[1], complaint, std::strlen(complaint)) < 0) ::_exit(2);
    ::_exit(complaint == nullptr ? 0 : 1);
  }
  ::close(channel[1]);
  std::array<char, 256> text{};
  const ssize_t n = ::read(channel[0], text.data(), text.size());
  ::close(channel[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return n > 0 ? std::string(text.data(), static_cast<std::size_t>(n)) : "the child died";
}

TEST_P(DeviceConformance, HasAName) { EXPECT_FALSE(device_->name().empty()); }

TEST_P(DeviceConformance, MakesAPoolOfTheSizeAskedFor) {
  for (const std::uint64_t bytes : {std::uint64_t{4096}, kPoolBytes, kPoolBytes + 4096}) {
    const std::unique_ptr<Pool> pool = make_pool(bytes);
    ASSERT_NE(pool, nullptr);
    EXPECT_EQ(pool->bytes(), bytes);
    EXPECT_GE(pool->export_fd(), 0);
    const std::span<std::byte> view = pool->host_view();
    EXPECT_TRUE(view.empty() || view.size() == bytes);
  }
}

TEST_P(DeviceConformance, RefusesAPoolOfNoBytes) {
  const Result<std::unique_ptr<Pool>> pool = device_->create_pool("empty", 0);
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, FaultCode::kInvalid);
}

TEST_P(DeviceConformance, SaysHowMuchWasAskedForAndHowMuchThereIsWhenAPoolIsTooLarge) {
  const std::uint64_t bytes = std::uint64_t{1} << 60;
  const Result<std::unique_ptr<Pool>> pool = device_->create_pool("huge", bytes);
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, FaultCode::kLimit);
  EXPECT_NE(pool.error().text.find(std::to_string(bytes)), std::string::npos) << pool.error().text;
  EXPECT_NE(pool.error().text.find("available"), std::string::npos) << pool.error().text;
  EXPECT_NE(make_pool(), nullptr) << "a refused pool must leave the device usable";
}

TEST_P(DeviceConformance, ReadsBackWhatWasWrittenAndZeroesElsewhere) {
  const std::unique_ptr<Pool> pool = make_pool();
  ASSERT_NE(pool, nullptr);
  std::vector<std::byte> model(kPoolBytes);
  std::mt19937_64 random(7);
  for (int i = 0; i < 40; ++i) {
    const std::uint64_t offset = random() % kPoolBytes;
    const std::vector<std::byte> bytes =
        random_bytes(1 + random() % std::min<std::uint64_t>(kPoolBytes - offset, 200'000), random());
    ASSERT_TRUE(pool->write(offset, bytes));
    std::copy(bytes.begin(), bytes.end(), model.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  std::vector<std::byte> seen(kPoolBytes);
  ASSERT_TRUE(pool->read(0, seen));
  EXPECT_TRUE(seen == model);
  if (const std::span<std::byte> view = pool->host_view(); !view.empty()) {
    EXPECT_TRUE(std::equal(view.begin(), view.end(), model.begin()));
  }
}

TEST_P(DeviceConformance, RefusesRangesThatAreNotInsideThePool) {
  const std::unique_ptr<Pool> pool = make_pool();
  ASSERT_NE(pool, nullptr);
  std::vector<std::byte> bytes(4096);
  for (const std::uint64_t offset :
       {kPoolBytes - 4095, kPoolBytes, kPoolBytes + 1, std::numeric_limits<std::uint64_t>::max(),
        std::numeric_limits<std::uint64_t>::max() - 4095}) {
    const Status written = pool->write(offset, bytes);
    ASSERT_FALSE(written) << offset;
    EXPECT_EQ(written.error().code, FaultCode::kInvalid);
    const Status read = pool->read(offset, bytes);
    ASSERT_FALSE(read) << offset;
    EXPECT_EQ(read.error().code, FaultCode::kInvalid);
  }
  EXPECT_TRUE(pool->write(kPoolBytes - 4096, bytes));
  EXPECT_TRUE(pool->read(kPoolBytes, {})) << "nothing at the end is inside";
}

TEST_P(DeviceConformance, AnotherProcessReadsThePoolAndCannotChangeIt) {
  const std::unique_ptr<Pool> pool = make_pool();
  ASSERT_NE(pool, nullptr);
  const std::vector<std::byte> bytes = random_bytes(kPoolBytes, 3);
  ASSERT_TRUE(pool->write(0, bytes));
  EXPECT_EQ(see_as_another_process(GetParam().client, pool->export_fd(), bytes), "");
  std::vector<std::byte> seen(kPoolBytes);
  ASSERT_TRUE(pool->read(0, seen));
  EXPECT_TRUE(seen == bytes);

  std::vector<std::byte> flipped = bytes;
  flipped[kPoolBytes / 2] ^= std::byte{1};
  EXPECT_EQ(see_as_another_process(GetParam().client, pool->export_fd(), flipped),
            "other bytes than were written")
      << "the client must notice one flipped bit, or this test shows nothing";
}

TEST_P(DeviceConformance, BackedBytesNeverShrinkAndReachWhatWasWritten) {
  const std::unique_ptr<Pool> pool = make_pool();
  ASSERT_NE(pool, nullptr);
  const std::vector<std::byte> bytes = random_bytes(kPoolBytes / 4, 9);
  std::uint64_t before = pool->bytes_backed();
  for (std::uint64_t offset = 0; offset < kPoolBytes; offset += bytes.size()) {
    ASSERT_TRUE(pool->write(offset, bytes));
    EXPECT_GE(pool->bytes_backed(), before);
    EXPECT_GE(pool->bytes_backed(), offset + bytes.size());
    before = pool->bytes_backed();
  }
}

TEST_P(DeviceConformance, TwoPoolsShareNoByte) {
  const std::unique_ptr<Pool> a = make_pool(), b = make_pool();
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_NE(a->export_fd(), b->export_fd());
  const std::vector<std::byte> in_a = random_bytes(kPoolBytes, 1), in_b = random_bytes(kPoolBytes, 2);
  ASSERT_TRUE(a->write(0, in_a));
  ASSERT_TRUE(b->write(0, in_b));
  std::vector<std::byte> seen(kPoolBytes);
  ASSERT_TRUE(a->read(0, seen));
  EXPECT_TRUE(seen == in_a);
  ASSERT_TRUE(b->read(0, seen));
  EXPECT_TRUE(seen == in_b);
}

TEST_P(DeviceConformance, APoolOutlivesItsDevice) {
  const std::unique_ptr<Pool> pool = make_pool();
  ASSERT_NE(pool, nullptr);
  device_.reset();
  const std::vector<std::byte> bytes = random_bytes(4096, 4);
  ASSERT_TRUE(pool->write(0, bytes));
  std::vector<std::byte> seen(4096);
  ASSERT_TRUE(pool->read(0, seen));
  EXPECT_TRUE(seen == bytes);
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceConformance, testing::ValuesIn(kDevices),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace moecached
