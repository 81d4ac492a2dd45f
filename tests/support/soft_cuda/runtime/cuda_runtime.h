// As much of the CUDA runtime as examples/engine/moe_layer.cu and tests/stress/route_ipc call, over the soft
// driver, so that they run where there is no GPU: kernels are host functions, called for one thread after the
// other. launches_to_calls.py has turned <<<..>>> into SOFT_LAUNCH. Kernels that share memory or wait for
// each other cannot run so. Thread: one.
#pragma once

#include <cuda.h>

#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define SOFT_LAUNCH(kernel, grid, block, shared, stream) \
  soft_cuda::launch((static_cast<void>(stream), grid), block, kernel)

using cudaStream_t = CUstream;
using cudaEvent_t = CUevent;
using cudaError_t = CUresult;
struct cudaDeviceProp {
  CUuuid uuid;
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline constexpr cudaError_t cudaSuccess = CUDA_SUCCESS;
inline constexpr unsigned cudaStreamNonBlocking = CU_STREAM_NON_BLOCKING;
inline constexpr unsigned cudaEventDisableTiming = CU_EVENT_DISABLE_TIMING;

namespace soft_cuda {

struct Index {
  unsigned x = 0;
};
inline Index thread_index, block_index, block_size;

template <typename Kernel>
auto launch(unsigned grid, unsigned block, Kernel kernel) {
  return [=](auto... arguments) {
    block_size.x = block;
    for (block_index.x = 0; block_index.x < grid; ++block_index.x) {
      for (thread_index.x = 0; thread_index.x < block; ++thread_index.x) kernel(arguments...);
    }
  };
}

}  // namespace soft_cuda

#define threadIdx soft_cuda::thread_index
#define blockIdx soft_cuda::block_index
#define blockDim soft_cuda::block_size

inline const char* cudaGetErrorString(cudaError_t error) {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == CUDA_SUCCESS ? text : "an unknown error";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// The example's first call: the runtime makes the primary context current on its own.
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int ordinal) {
  CUdevice device = 0;
  CUcontext context = nullptr;
  if (const CUresult failed = cuInit(0)) return failed;
  if (const CUresult failed = cuDeviceGet(&device, ordinal)) return failed;
  if (const CUresult failed = cuDevicePrimaryCtxRetain(&context, device)) return failed;
  if (const CUresult failed = cuCtxSetCurrent(context)) return failed;
  return cuDeviceGetUuid(&out->uuid, device);
}

template <typename T>
cudaError_t cudaMalloc(T** out, std::size_t bytes) {
  CUdeviceptr at = 0;
  const CUresult result = cuMemAlloc(&at, bytes);
  *out = reinterpret_cast<T*>(at);
  return result;
}
using cudaIpcMemHandle_t = CUipcMemHandle;
inline constexpr unsigned cudaIpcMemLazyEnablePeerAccess = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
inline cudaError_t cudaSetDevice(int ordinal) {
  cudaDeviceProp ignored;
  return cudaGetDeviceProperties(&ignored, ordinal);
}
inline cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned flags) {
  CUdeviceptr at = 0;
  const CUresult result = cuIpcOpenMemHandle(&at, handle, flags);
  *out = reinterpret_cast<void*>(at);
  return result;
}
inline cudaError_t cudaIpcCloseMemHandle(void* at) {
  return cuIpcCloseMemHandle(reinterpret_cast<CUdeviceptr>(at));
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cuStreamCreate(stream, flags);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cuStreamSynchronize(stream); }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return cuStreamWaitEvent(stream, event, flags);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return cuEventCreate(event, flags);
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cuEventRecord(event, stream);
}
