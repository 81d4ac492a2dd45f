// The CUDA driver, opened at run time: libcuda.so.1 belongs to the machine's kernel module, so nothing links
// to it. The table holds the entry points that the client calls, under the versioned names that the library
// exports. Thread: any; loaded once, on the first call. Memory: never unloaded.
//
// CudaContext is a reference to the primary context of one GPU, the one that the CUDA runtime (and ggml) uses
// too: memory mapped in it is seen by the engine's kernels. Every call that needs it current goes through
// ScopedContext, which leaves the caller's own current context as it was.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <span>

#include "client/include/moecached/moecached.h"
#include "client/src/gpu_segment.h"
#include "client/src/resources.h"

namespace moecached::client {

#define MOECACHED_CUDA_FUNCTIONS(X)                                                                          \
  X(cuInit)                                                                                                  \
  X(cuGetErrorString)                                                                                        \
  X(cuDeviceGetCount)                                                                                        \
  X(cuDeviceGet)                                                                                             \
  X(cuDeviceGetUuid_v2)                                                                                      \
  X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuCtxPushCurrent_v2) \
      X(cuCtxPopCurrent_v2) X(cuCtxSynchronize) X(cuMemAddressReserve) X(cuMemAddressFree)                   \
          X(cuMemImportFromShareableHandle) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)      \
              X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuMemHostGetDevicePointer_v2)                 \
                  X(cuMemcpy2DAsync_v2) X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamSynchronize)       \
                      X(cuStreamWaitEvent) X(cuStreamWriteValue64_v2) X(cuEventRecord) X(cuMemCreate)        \
                          X(cuMemsetD32_v2) X(cuMemsetD8_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoDAsync_v2) \
                              X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventSynchronize)                    \
                                  X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction)               \
                                      X(cuLaunchKernel) X(cuStreamWaitValue32_v2) X(cuMemAlloc_v2)           \
                                          X(cuMemFree_v2)

struct CudaDriver {
#define MOECACHED_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  MOECACHED_CUDA_FUNCTIONS(MOECACHED_CUDA_MEMBER)
#undef MOECACHED_CUDA_MEMBER
};

// MOECACHED_E_UNAVAILABLE: this machine has no driver, or none that works; the sentence says what failed.
// $MOECACHED_LIBCUDA names another library (tests).
[[nodiscard]] moecached_status load_cuda();

// REQUIRES: load_cuda() has succeeded.
[[nodiscard]] const CudaDriver& cuda() noexcept;

// MOECACHED_OK for CUDA_SUCCESS; else a sentence: "cannot <what>: <the driver's words>".
[[nodiscard]] moecached_status check_cuda(CUresult result, const char* what) noexcept;

class CudaContext {
 public:
  // MOECACHED_E_ARGUMENT: this process sees no GPU with that UUID.
  [[nodiscard]] static moecached_status open(const GpuUuid& uuid, std::shared_ptr<CudaContext>* out);
  CudaContext(CUdevice device, CUcontext context) noexcept : device_(device), context_(context) {}
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  [[nodiscard]] CUdevice device() const noexcept { return device_; }
  [[nodiscard]] CUcontext handle() const noexcept { return context_; }
  [[nodiscard]] int attribute(CUdevice_attribute which) const noexcept;

 private:
  CUdevice device_;
  CUcontext context_;
};

class ScopedContext {
 public:
  explicit ScopedContext(const CudaContext& context) noexcept
      : result_(cuda().cuCtxPushCurrent_v2(context.handle())) {}
  ~ScopedContext() {
    CUcontext popped = nullptr;
    if (result_ == CUDA_SUCCESS) cuda().cuCtxPopCurrent_v2(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  [[nodiscard]] moecached_status status() const noexcept { return check_cuda(result_, "use the GPU"); }

 private:
  CUresult result_;
};

// Memory of this process, page-locked and readable or writable by GPUs until the end of this object.
class HostRegistration {
 public:
  // The range is widened to whole pages.
  [[nodiscard]] static moecached_status open(std::shared_ptr<CudaContext> context, const Mapping& memory,
                                             unsigned flags, std::shared_ptr<HostRegistration>* out) {
    return open(std::move(context), std::span(memory.data(), memory.bytes()), flags, out);
  }
  [[nodiscard]] static moecached_status open(std::shared_ptr<CudaContext> context,
                                             std::span<std::byte> memory, unsigned flags,
                                             std::shared_ptr<HostRegistration>* out);
  HostRegistration(std::shared_ptr<CudaContext> context, std::byte* address) noexcept
      : context_(std::move(context)), address_(address) {}
  ~HostRegistration();
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

 private:
  std::shared_ptr<CudaContext> context_;
  std::byte* address_;
};

}  // namespace moecached::client
