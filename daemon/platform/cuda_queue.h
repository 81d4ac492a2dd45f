// The queue of one GPU (GpuQueue), on CUDA streams.
#pragma once

#include <memory>

#include "daemon/base/result.h"
#include "daemon/platform/cuda_context.h"
#include "daemon/platform/gpu.h"

namespace moecached {

Result<std::unique_ptr<GpuQueue>> create_cuda_queue(CudaContextPtr context);

}  // namespace moecached
