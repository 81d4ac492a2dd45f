// Memory that another process opens by 64 bytes: the reader is a child, as the driver refuses it to the
// process that made it.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "daemon/platform/gpu.h"
#include "tests/unit/platform/soft_gpu.h"

namespace moecached {
namespace {

using testing::HasSubstr;

class GpuIpcTest : public SoftGpuTest {
 protected:
  // What a child finds at an offset; 0: it could not open the memory.
  int byte_seen_by_a_child(const GpuIpcBuffer& buffer, std::uint64_t offset) {
    const pid_t child = ::fork();
    if (child == 0) {
      CUipcMemHandle handle;
      std::memcpy(&handle, buffer.handle().data(), sizeof handle);
      CUcontext context = nullptr;
      CUdeviceptr at = 0;
      cuda_.get<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, 0);
      cuda_.get<CUresult(CUcontext)>("cuCtxSetCurrent")(context);
      if (cuda_.get<CUresult(CUdeviceptr*, CUipcMemHandle, unsigned)>("cuIpcOpenMemHandle_v2")(
              &at, handle, 1) != CUDA_SUCCESS)
        ::_exit(0);
      ::_exit(static_cast<int>(reinterpret_cast<const unsigned char*>(at)[offset]));
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  }
};

TEST_F(GpuIpcTest, AnotherProcessReadsWhatWasCopiedThere) {
  auto buffer = gpu_->create_ipc_buffer(2 * kGranularity);
  ASSERT_TRUE(buffer) << buffer.error().text;
  EXPECT_EQ((*buffer)->bytes(), 2 * kGranularity);
  auto host = gpu_->create_host_memory(kGranularity);
  ASSERT_TRUE(host);
  std::memset((*host)->bytes().data(), 77, 4096);
  const auto device = backed_range(kGranularity);
  const std::vector<std::byte> other(4096, std::byte{99});
  ASSERT_TRUE(gpu_->write(device->address(), other));
  const GpuIpcBuffer::Copy copies[] = {
      {.offset = 256, .source = reinterpret_cast<std::uint64_t>((*host)->bytes().data()), .bytes = 4096},
      {.offset = kGranularity, .source = device->address(), .bytes = 4096, .from_device = true}};
  const Status copied = (*buffer)->copy(copies);
  ASSERT_TRUE(copied) << copied.error().text;
  EXPECT_EQ(byte_seen_by_a_child(**buffer, 256), 77);
  EXPECT_EQ(byte_seen_by_a_child(**buffer, kGranularity + 4095), 99);
}

TEST_F(GpuIpcTest, MemoryThatIsNotThereIsSaidAndEverythingGivenBack) {
  auto buffer = gpu_->create_ipc_buffer(1ull << 40);
  ASSERT_FALSE(buffer);
  EXPECT_EQ(buffer.error().code, FaultCode::kLimit);
  cuda_.fail_next("cuIpcGetMemHandle", CUDA_ERROR_NOT_SUPPORTED);
  auto without = gpu_->create_ipc_buffer(kGranularity);
  ASSERT_FALSE(without);
  EXPECT_THAT(without.error().text, HasSubstr("operation not supported"));
}

TEST_F(GpuIpcTest, ACopyThatFailsIsSaid) {
  auto buffer = gpu_->create_ipc_buffer(kGranularity);
  ASSERT_TRUE(buffer);
  auto host = gpu_->create_host_memory(kGranularity);
  ASSERT_TRUE(host);
  cuda_.fail_next("cuMemcpyHtoDAsync", CUDA_ERROR_ILLEGAL_ADDRESS);
  const GpuIpcBuffer::Copy copy{.source = reinterpret_cast<std::uint64_t>((*host)->bytes().data()),
                                .bytes = 1};
  EXPECT_FALSE((*buffer)->copy({&copy, 1}));
}

TEST(GpuIdText, IsReadAsItIsWritten) {
  const char* const text = "GPU-50f7c0da-0000-0a00-0000-0000000000ff";
  const auto id = parse_gpu_id(text);
  ASSERT_TRUE(id);
  EXPECT_EQ(to_string(*id), text);
  for (const char* const bad :
       {"", "GPU-", "50f7c0da-0000-0a00-0000-0000000000ff", "GPU-50f7c0da-0000-0a00-0000-0000000000f",
        "GPU-50F7C0DA-0000-0A00-0000-0000000000FF", "GPU-50f7c0da-0000-0a00-0000-0000000000ff0", "auto"})
    EXPECT_FALSE(parse_gpu_id(bad)) << bad;
}

}  // namespace
}  // namespace moecached
