#include "daemon/platform/gpu.h"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/platform/soft_gpu.h"

namespace moecached {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> random_bytes(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// Shared memory as a client would map it. Descriptors of the soft driver are those of memfds.
class Shared {
 public:
  Shared(const Result<UniqueFd>& fd, int protection) {
    EXPECT_TRUE(fd);
    if (!fd) return;
    struct stat facts {};
    EXPECT_EQ(::fstat(fd->get(), &facts), 0);
    bytes_ = static_cast<std::size_t>(facts.st_size);
    view_ = ::mmap(nullptr, bytes_, protection, MAP_SHARED, fd->get(), 0);
  }
  ~Shared() {
    if (view_ != MAP_FAILED) ::munmap(view_, bytes_);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  [[nodiscard]] bool is_mapped() const { return view_ != MAP_FAILED; }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_), is_mapped() ? bytes_ : 0};
  }

 private:
  void* view_ = MAP_FAILED;
  std::size_t bytes_ = 0;
};

class GpuTest : public SoftGpuTest {};

TEST_F(GpuTest, IsListedByUuidAndNameAndTakesNothingUntilItIsUsed) {
  EXPECT_EQ(to_string(gpu_->id()), "GPU-50f7c0da-0000-0000-0000-000000000001");
  EXPECT_EQ(gpu_->name(), "Soft CUDA");
  EXPECT_EQ(gpu_->granularity(), kGranularity);
  EXPECT_EQ(gpu_->host_memory_fallback(), "");
  EXPECT_EQ(cuda_.objects(), 0u) << "a daemon without models on the GPU holds no context";
  EXPECT_EQ(first_gpu()->id(), gpu_->id());
}

TEST_F(GpuTest, WhatCannotBeListedIsNamedInTheReason) {
  std::string reason;
  cuda_.fail_next("cuDeviceGetCount", CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_TRUE(list_gpus(&reason).empty());
  EXPECT_THAT(reason, HasSubstr("counting GPUs: operation not supported"));
  cuda_.fail_next("cuDeviceGetUuid", CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_TRUE(list_gpus(&reason).empty());
  EXPECT_THAT(reason, HasSubstr("GPU 0: UUID: operation not supported"));
}

// A process opens one driver, so this runs in another, where nothing has loaded the soft one.
TEST(GpuDeathTest, WithoutADriverThereIsNoGpuAndTheReasonSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("MOECACHED_LIBCUDA", "/nowhere/libcuda.so.1", 1);
        std::string reason;
        const bool is_empty = list_gpus(&reason).empty();
        std::fprintf(stderr, "%s\n", reason.c_str());
        std::_Exit(is_empty ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "no NVIDIA driver: /nowhere/libcuda.so.1");
}

TEST_F(GpuTest, MemoryInfoFollowsWhatIsTaken) {
  const auto before = gpu_->memory_info();
  ASSERT_TRUE(before);
  EXPECT_EQ(before->total, 256u << 20);
  EXPECT_EQ(before->free, before->total);
  const auto range = backed_range(3 * kGranularity);
  EXPECT_EQ(gpu_->memory_info()->free, before->total - 3 * kGranularity);
  const auto host = host_memory(kGranularity);
  EXPECT_EQ(gpu_->memory_info()->free, before->total - 3 * kGranularity) << "pinned memory is the host's";
}

TEST_F(GpuTest, AFaultSaysWhatWasTriedAndWhatTheDriverSaid) {
  cuda_.fail_next("cuMemGetInfo", CUDA_ERROR_ILLEGAL_ADDRESS);
  const auto info = gpu_->memory_info();
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, FaultCode::kSystem);
  EXPECT_EQ(info.error().text,
            "asking how much GPU memory is free: an illegal memory access was encountered (CUDA 700)");
  cuda_.fail_next("cuMemAddressReserve", CUDA_ERROR_OUT_OF_MEMORY);
  const auto range = gpu_->reserve(kGranularity);
  ASSERT_FALSE(range);
  EXPECT_EQ(range.error().code, FaultCode::kLimit);
}

TEST_F(GpuTest, AContextThatCannotBeMadeCurrentIsAFaultAndTriedAgain) {
  (void)gpu_->memory_info();
  cuda_.fail_next("cuCtxPushCurrent", CUDA_ERROR_DEINITIALIZED);
  EXPECT_FALSE(gpu_->memory_info());
  EXPECT_EQ(cuda_.current(), nullptr) << "what was not pushed is not popped";
  EXPECT_TRUE(gpu_->memory_info());
}

TEST_F(GpuTest, AContextThatCannotBeMadeIsAFaultAndTriedAgain) {
  for (const char* function : {"cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain"}) {
    cuda_.fail_next(function, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_FALSE(gpu_->memory_info()) << function;
    EXPECT_EQ(cuda_.objects(), 0u) << function;
  }
  EXPECT_TRUE(gpu_->memory_info());
}

TEST_F(GpuTest, AnyThreadMayUseIt) {
  (void)gpu_->memory_info();
  std::thread([&] {
    EXPECT_TRUE(gpu_->memory_info());
    const auto range = backed_range(kGranularity);
    EXPECT_EQ(cuda_.current(), nullptr);
  }).join();
}

TEST_F(GpuTest, WhatItMadeOutlivesIt) {
  auto range = backed_range(2 * kGranularity);
  auto host = host_memory(kGranularity);
  gpu_.reset();
  host->bytes()[0] = std::byte{7};
  *device(range->address()) = std::byte{8};
  EXPECT_TRUE(range->share(0));
  EXPECT_TRUE(host->share());
}

// ---------------------------------------------------------------------------------------------- host memory

TEST_F(GpuTest, HostMemoryIsRoundedUpToTheGranularityAndShared) {
  const auto host = host_memory(kGranularity + 1);
  EXPECT_EQ(host->kind(), MOECACHED_HOST_MEMORY_VMM);
  ASSERT_EQ(host->bytes().size(), 2 * kGranularity);
  EXPECT_EQ(gpu_->host_memory_fallback(), "");
  const Shared client(host->share(), PROT_READ);
  ASSERT_EQ(client.bytes().size(), 2 * kGranularity);
  const auto written = random_bytes(2 * kGranularity, 1);  // after it was mapped
  std::memcpy(host->bytes().data(), written.data(), written.size());
  EXPECT_TRUE(std::ranges::equal(client.bytes(), written));
}

TEST_F(GpuTest, ADriverThatSharesNoHostMemoryGetsARegisteredMemfdThatClientsCannotWrite) {
  const EnvironmentVariable old_driver("SOFT_CUDA_NO_HOST_NUMA", "1");
  const auto host = host_memory(kGranularity + 1);
  EXPECT_EQ(host->kind(), MOECACHED_HOST_MEMORY_MEMFD);
  ASSERT_EQ(host->bytes().size(), 2 * kGranularity);
  EXPECT_THAT(gpu_->host_memory_fallback(), HasSubstr("operation not supported"));
  const auto written = random_bytes(2 * kGranularity, 2);
  std::memcpy(host->bytes().data(), written.data(), written.size());
  const Shared client(host->share(), PROT_READ);
  EXPECT_TRUE(std::ranges::equal(client.bytes(), written));
  EXPECT_FALSE(Shared(host->share(), PROT_READ | PROT_WRITE).is_mapped());
  // It knows now, and does not ask again.
  const std::string calls = cuda_.calls_of([&] { (void)host_memory(kGranularity); });
  EXPECT_THAT(calls, ::testing::Not(HasSubstr("cuMemCreate")));
  EXPECT_THAT(calls, HasSubstr("cuMemHostRegister"));
}

TEST_F(GpuTest, HostMemoryThatThereIsNotEnoughOfIsALimitAndNoReasonToFallBack) {
  cuda_.fail_next("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY);
  const auto host = gpu_->create_host_memory(kGranularity);
  ASSERT_FALSE(host);
  EXPECT_EQ(host.error().code, FaultCode::kLimit);
  EXPECT_THAT(host.error().text, HasSubstr("2097152 bytes"));
  EXPECT_EQ(gpu_->host_memory_fallback(), "");
  EXPECT_EQ(host_memory(kGranularity)->kind(), MOECACHED_HOST_MEMORY_VMM);
}

TEST_F(GpuTest, HostMemoryThatCannotBeMappedOrPinnedLeavesNothingBehind) {
  (void)gpu_->memory_info();
  const auto before = cuda_.objects();
  for (const char* function : {"cuMemMap", "cuMemSetAccess"}) {
    const auto other = first_gpu();
    cuda_.fail_next(function, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_FALSE(other->create_host_memory(kGranularity)) << function;
  }
  EXPECT_EQ(cuda_.objects(), before);
  const EnvironmentVariable old_driver("SOFT_CUDA_NO_HOST_NUMA", "1");
  cuda_.fail_next("cuMemHostRegister", CUDA_ERROR_NOT_SUPPORTED);
  const auto host = gpu_->create_host_memory(kGranularity);
  ASSERT_FALSE(host);
  EXPECT_THAT(host.error().text, HasSubstr("pinning 2097152 bytes of memory"));
  EXPECT_EQ(cuda_.objects(), before);
}

// ---------------------------------------------------------------------------------------------------- ranges

TEST_F(GpuTest, ARangeIsAddressesThatGrowIntoZeroedMemoryPieceByPiece) {
  auto range = gpu_->reserve(8 * kGranularity);
  ASSERT_TRUE(range);
  EXPECT_EQ((*range)->bytes(), 8 * kGranularity);
  EXPECT_EQ((*range)->address() % kGranularity, 0u);
  EXPECT_EQ((*range)->chunks(), 0u);
  EXPECT_EQ(cuda_.vram_used(), 0u);
  const std::uint64_t pieces[][2] = {{0, 1}, {1, 3}, {4, 2}};  // in granules
  std::size_t n = 0;
  for (const auto& [offset, count] : pieces) {
    ASSERT_TRUE((*range)->grow(offset * kGranularity, count * kGranularity));
    EXPECT_EQ((*range)->chunks(), ++n);
  }
  EXPECT_EQ(cuda_.vram_used(), 6 * kGranularity);
  const std::span<const std::byte> backed(device((*range)->address()), 6 * kGranularity);
  EXPECT_TRUE(std::ranges::all_of(backed, [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(GpuTest, EachChunkIsSharedAsAWholeAndSeesWhatIsWritten) {
  auto range = gpu_->reserve(3 * kGranularity);
  ASSERT_TRUE(range);
  ASSERT_TRUE((*range)->grow(0, kGranularity));
  ASSERT_TRUE((*range)->grow(kGranularity, 2 * kGranularity));
  const Shared first((*range)->share(0), PROT_READ), second((*range)->share(1), PROT_READ);
  ASSERT_EQ(first.bytes().size(), kGranularity);
  ASSERT_EQ(second.bytes().size(), 2 * kGranularity);
  const auto content = random_bytes(3 * kGranularity, 3);
  ASSERT_TRUE(gpu_->write((*range)->address(), content));
  EXPECT_TRUE(std::ranges::equal(first.bytes(), std::span(content).first(kGranularity)));
  EXPECT_TRUE(std::ranges::equal(second.bytes(), std::span(content).subspan(kGranularity)));
}

TEST_F(GpuTest, AClientsMappingOutlivesTheRange) {
  auto range = backed_range(kGranularity);
  const Shared client(range->share(0), PROT_READ);
  ASSERT_TRUE(gpu_->write(range->address(), random_bytes(100, 4)));
  range.reset();
  EXPECT_TRUE(std::ranges::equal(client.bytes().first(100), random_bytes(100, 4)));
}

TEST_F(GpuTest, AGrowthThatThereIsNoMemoryForIsALimitAndChangesNothing) {
  const EnvironmentVariable small("SOFT_CUDA_VRAM", "8388608");
  auto range = gpu_->reserve(16 * kGranularity);
  ASSERT_TRUE(range);
  ASSERT_TRUE((*range)->grow(0, 3 * kGranularity));
  const Status grown = (*range)->grow(3 * kGranularity, 2 * kGranularity);
  ASSERT_FALSE(grown);
  EXPECT_EQ(grown.error().code, FaultCode::kLimit);
  EXPECT_EQ((*range)->chunks(), 1u);
  EXPECT_EQ(cuda_.vram_used(), 3 * kGranularity);
  EXPECT_TRUE((*range)->grow(3 * kGranularity, kGranularity)) << "less fits";
}

TEST_F(GpuTest, AGrowthThatFailsAtAnyStepLeavesNothingAndMayBeTriedAgain) {
  auto range = gpu_->reserve(2 * kGranularity);
  ASSERT_TRUE(range);
  ASSERT_TRUE((*range)->grow(0, kGranularity));
  const auto before = cuda_.objects();
  for (const char* function :
       {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuStreamSynchronize"}) {
    cuda_.fail_next(function, CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_FALSE((*range)->grow(kGranularity, kGranularity)) << function;
    EXPECT_EQ((*range)->chunks(), 1u) << function;
    EXPECT_EQ(cuda_.objects(), before) << function;
    EXPECT_EQ(cuda_.vram_used(), kGranularity) << function;
  }
  EXPECT_TRUE((*range)->grow(kGranularity, kGranularity));
  EXPECT_EQ((*range)->chunks(), 2u);
}

TEST_F(GpuTest, WriteReturnsWhenTheBytesAreThere) {
  const auto range = backed_range(kGranularity);
  const auto content = random_bytes(12345, 5);
  ASSERT_TRUE(gpu_->write(range->address() + 777, content));
  EXPECT_EQ(std::memcmp(device(range->address() + 777), content.data(), content.size()), 0);
  EXPECT_EQ(*device(range->address() + 776), std::byte{0});
  EXPECT_EQ(*device(range->address() + 777 + content.size()), std::byte{0});
  cuda_.fail_next("cuMemcpyHtoD", CUDA_ERROR_ILLEGAL_ADDRESS);
  const Status written = gpu_->write(range->address(), content);
  ASSERT_FALSE(written);
  EXPECT_THAT(written.error().text, HasSubstr("writing GPU memory: an illegal memory access"));
}

TEST_F(GpuTest, MeasuresTheLinkAndGivesTheMemoryBack) {
  const auto rate = gpu_->measure_copy_rate();
  ASSERT_TRUE(rate);
  EXPECT_GT(*rate, 1e6);
  EXPECT_EQ(cuda_.vram_used(), 0u);
  for (const char* function : {"cuMemAlloc", "cuStreamCreateWithPriority", "cuMemcpyHtoDAsync"}) {
    cuda_.fail_next(function, CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_FALSE(gpu_->measure_copy_rate()) << function;
    EXPECT_EQ(cuda_.vram_used(), 0u) << function;
  }
}

// Two GPUs; the fixture's own is a third object for the first of them.
class PeerGpuTest : public GpuTest {
 protected:
  std::vector<std::unique_ptr<Gpu>> two() {
    const EnvironmentVariable devices("SOFT_CUDA_DEVICES", "2");
    std::string reason;
    auto gpus = list_gpus(&reason);
    EXPECT_EQ(gpus.size(), 2u) << reason;
    return gpus;
  }
  const EnvironmentVariable devices_{"SOFT_CUDA_DEVICES", "1"};  // what list_gpus in SetUp sees
};

TEST_F(PeerGpuTest, MeasuresTheWayToAnotherGpuAndGivesTheMemoryBack) {
  const EnvironmentVariable devices("SOFT_CUDA_DEVICES", "2");
  const auto gpus = two();
  const auto rate = gpus[0]->measure_peer_rate(*gpus[1]);
  ASSERT_TRUE(rate) << rate.error().text;
  EXPECT_GT(*rate, 1e6);
  EXPECT_EQ(cuda_.vram_used(), 0u);
  for (const char* function :
       {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemcpyDtoDAsync"}) {
    cuda_.fail_next(function, CUDA_ERROR_ILLEGAL_ADDRESS);
    const auto failed = gpus[0]->measure_peer_rate(*gpus[1]);
    ASSERT_FALSE(failed) << function;
    EXPECT_NE(failed.error().code, FaultCode::kUnsupported) << function << ": it may pass";
    EXPECT_EQ(cuda_.vram_used(), 0u) << function;
  }
}

TEST_F(PeerGpuTest, WithoutAWayBetweenThemItIsUnsupportedAndBothAreNamed) {
  const EnvironmentVariable devices("SOFT_CUDA_DEVICES", "2"), none("SOFT_CUDA_NO_PEERS", "1");
  const auto gpus = two();
  const auto rate = gpus[0]->measure_peer_rate(*gpus[1]);
  ASSERT_FALSE(rate);
  EXPECT_EQ(rate.error().code, FaultCode::kUnsupported);
  EXPECT_FALSE(gpus[0]->can_read(*gpus[1]));
  EXPECT_THAT(rate.error().text, HasSubstr(to_string(gpus[0]->id())));
  EXPECT_THAT(rate.error().text, HasSubstr(to_string(gpus[1]->id())));
}

TEST_F(PeerGpuTest, AProbeIsMemoryOfTheOtherAndTheSameForAll) {
  const EnvironmentVariable devices("SOFT_CUDA_DEVICES", "2");
  const auto gpus = two();
  auto probe = gpus[0]->share_probe(*gpus[1]);
  ASSERT_TRUE(probe) << probe.error().text;
  char name[64] = "";
  ASSERT_GT(::readlink(("/proc/self/fd/" + std::to_string(probe->get())).c_str(), name, sizeof name - 1), 0);
  EXPECT_THAT(name, HasSubstr("device-1"));
  const auto used = cuda_.vram_used();
  EXPECT_EQ(used, std::uint64_t{MOECACHED_PROBE_BYTES});
  EXPECT_TRUE(gpus[0]->share_probe(*gpus[1]));
  EXPECT_EQ(cuda_.vram_used(), used);
}

}  // namespace
}  // namespace moecached
