// Device memory for a process that takes no descriptors (GpuIpcBuffer), by CUDA's legacy IPC.
#pragma once

#include <cstdint>
#include <memory>

#include "daemon/base/result.h"
#include "daemon/platform/cuda_context.h"
#include "daemon/platform/gpu.h"

namespace moecached {

// bytes: a multiple of 2 MiB.
Result<std::unique_ptr<GpuIpcBuffer>> create_cuda_ipc_buffer(CudaContextPtr context, std::uint64_t bytes);

}  // namespace moecached
