// Memory of cuMemCreate, which slots are made of, has no legacy handle; cuMemAlloc's has one, of the whole
// block that the driver took it from. Blocks are 2 MiB or larger: an allocation of whole multiples shares its
// block with nobody.
#include "daemon/platform/cuda_ipc.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "daemon/base/check.h"

namespace moecached {
namespace {

class CudaIpcBuffer final : public GpuIpcBuffer {
 public:
  CudaIpcBuffer(CudaContextPtr context, std::uint64_t bytes) : context_(std::move(context)), bytes_(bytes) {}
  ~CudaIpcBuffer() override {
    const CudaContext::Use use(*context_);
    if (stream_ != nullptr) context_->cu.cuStreamDestroy(stream_);
    if (address_ != 0) context_->cu.cuMemFree(address_);
  }

  Status allocate() {
    const CudaContext::Use use(*context_);
    const CudaDriver& cu = context_->cu;
    if (const CUresult result = cu.cuMemAlloc(&address_, bytes_); result != CUDA_SUCCESS) {
      address_ = 0;
      return cu.fault("allocating " + std::to_string(bytes_) + " bytes to share", result);
    }
    // Readers see nothing that was somebody else's.
    CUresult result = cu.cuMemsetD8(address_, 0, bytes_);
    if (result == CUDA_SUCCESS) result = cu.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) return cu.fault("clearing GPU memory", result);
    result = cu.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0);
    if (result != CUDA_SUCCESS) return cu.fault("making a stream", result);
    CUipcMemHandle handle{};
    result = cu.cuIpcGetMemHandle(&handle, address_);
    if (result != CUDA_SUCCESS) return cu.fault("a handle of shared GPU memory", result);
    static_assert(sizeof handle == kHandleBytes);
    std::memcpy(handle_.data(), &handle, sizeof handle);
    return ok();
  }

  std::span<const std::byte, kHandleBytes> handle() const override { return handle_; }
  std::uint64_t bytes() const override { return bytes_; }

  Status copy(std::span<const Copy> copies) override {
    const CudaContext::Use use(*context_);
    const CudaDriver& cu = context_->cu;
    CUresult result = CUDA_SUCCESS;
    for (const Copy& each : copies) {
      CHECK(each.offset <= bytes_ && each.bytes <= bytes_ - each.offset);
      const CUdeviceptr to = address_ + each.offset;
      result = each.from_device
                   ? cu.cuMemcpyDtoDAsync(to, each.source, each.bytes, stream_)
                   : cu.cuMemcpyHtoDAsync(to, reinterpret_cast<const void*>(each.source),  // NOLINT
                                          each.bytes, stream_);
      if (result != CUDA_SUCCESS) break;
    }
    // Also behind a failure: what was started still reads its source.
    const CUresult done = cu.cuStreamSynchronize(stream_);
    if (result == CUDA_SUCCESS) result = done;
    if (result != CUDA_SUCCESS) return cu.fault("copying experts into shared GPU memory", result);
    return ok();
  }

 private:
  const CudaContextPtr context_;
  const std::uint64_t bytes_;
  CUdeviceptr address_ = 0;
  CUstream stream_ = nullptr;
  std::array<std::byte, kHandleBytes> handle_{};
};

}  // namespace

Result<std::unique_ptr<GpuIpcBuffer>> create_cuda_ipc_buffer(CudaContextPtr context, std::uint64_t bytes) {
  auto buffer = std::make_unique<CudaIpcBuffer>(std::move(context), bytes);
  if (Status allocated = buffer->allocate(); !allocated) return std::move(allocated).error();
  return std::unique_ptr<GpuIpcBuffer>(std::move(buffer));
}

}  // namespace moecached
