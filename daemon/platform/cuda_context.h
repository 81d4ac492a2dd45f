// The context of one GPU, which every call of the driver needs to be current. Callers are threads of all
// kinds, so a scope pushes it and pops it again. Thread: any.
#pragma once

#include <cuda.h>

#include <memory>

#include "daemon/platform/cuda_driver.h"

namespace moecached {

// The primary context of one device, held as long as anything of it exists.
class CudaContext {
 public:
  CudaContext(const CudaDriver& driver, CUdevice of_device, CUcontext context)
      : cu(driver), device(of_device), context_(context) {}
  ~CudaContext() { cu.cuDevicePrimaryCtxRelease(device); }
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  // Makes the context current for a scope. Where the driver refuses that, as it may of a GPU that is lost,
  // the calls within fail for want of a context, and are handled as failed calls are; so no scope lies within
  // that of another GPU.
  class Use {
   public:
    explicit Use(const CudaContext& context)
        : cu_(context.cu), is_current_(cu_.cuCtxPushCurrent(context.context_) == CUDA_SUCCESS) {}
    ~Use() {
      CUcontext popped = nullptr;
      if (is_current_) cu_.cuCtxPopCurrent(&popped);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const CudaDriver& cu_;
    const bool is_current_;
  };

  const CudaDriver& cu;
  const CUdevice device;

 private:
  CUcontext context_;
};
using CudaContextPtr = std::shared_ptr<CudaContext>;

}  // namespace moecached
