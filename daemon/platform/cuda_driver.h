// libcuda.so.1, loaded at run time: the entry points that gpu_cuda.cc uses, under the names of their current
// versions. Thread: any. Memory: loaded once, never unloaded.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

#include "daemon/base/result.h"

namespace moecached {

#define MOECACHED_CUDA_FUNCTIONS(X)                               \
  X(cuInit, cuInit)                                               \
  X(cuGetErrorString, cuGetErrorString)                           \
  X(cuDeviceGetCount, cuDeviceGetCount)                           \
  X(cuDeviceGet, cuDeviceGet)                                     \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2)                          \
  X(cuDeviceGetName, cuDeviceGetName)                             \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute)                   \
  X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer)                 \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)           \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)      \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2)                        \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2)                          \
  X(cuMemGetInfo, cuMemGetInfo_v2)                                \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity) \
  X(cuMemCreate, cuMemCreate)                                     \
  X(cuMemRelease, cuMemRelease)                                   \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle)   \
  X(cuMemAddressReserve, cuMemAddressReserve)                     \
  X(cuMemAddressFree, cuMemAddressFree)                           \
  X(cuMemMap, cuMemMap)                                           \
  X(cuMemUnmap, cuMemUnmap)                                       \
  X(cuMemSetAccess, cuMemSetAccess)                               \
  X(cuMemAlloc, cuMemAlloc_v2)                                    \
  X(cuMemFree, cuMemFree_v2)                                      \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle)                         \
  X(cuMemHostRegister, cuMemHostRegister_v2)                      \
  X(cuMemHostUnregister, cuMemHostUnregister)                     \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2)                                \
  X(cuMemcpyAsync, cuMemcpyAsync)                                 \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)                      \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2)                      \
  X(cuMemsetD8, cuMemsetD8_v2)                                    \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority)       \
  X(cuStreamDestroy, cuStreamDestroy_v2)                          \
  X(cuStreamSynchronize, cuStreamSynchronize)                     \
  X(cuStreamWriteValue32, cuStreamWriteValue32_v2)                \
  X(cuEventCreate, cuEventCreate)                                 \
  X(cuEventDestroy, cuEventDestroy_v2)                            \
  X(cuEventRecord, cuEventRecord)                                 \
  X(cuEventQuery, cuEventQuery)                                   \
  X(cuEventSynchronize, cuEventSynchronize)

// The header maps plain names to versioned ones by macros; the members below are plain, so these go away.
#undef cuDeviceGetUuid
#undef cuMemcpyBatchAsync
#undef cuDevicePrimaryCtxRelease
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuMemGetInfo
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemHostRegister
#undef cuMemcpyHtoD
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoDAsync
#undef cuMemsetD8
#undef cuStreamDestroy
#undef cuStreamWriteValue32
#undef cuEventDestroy

struct CudaDriver {
#define MOECACHED_CUDA_MEMBER(name, symbol) decltype(&::symbol) name = nullptr;
  MOECACHED_CUDA_FUNCTIONS(MOECACHED_CUDA_MEMBER)
#undef MOECACHED_CUDA_MEMBER

  // Several copies in one call, by the name and parameters of CUDA 12.8; null in older drivers.
  using CopyBatch = CUresult(CUDAAPI*)(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* bytes,
                                       std::size_t count, void* attributes, std::size_t* attribute_firsts,
                                       std::size_t n_attributes, std::size_t* failed, CUstream stream);
  CopyBatch cuMemcpyBatchAsync = nullptr;

  // $MOECACHED_LIBCUDA, else libcuda.so.1. The text of a fault says what is missing.
  static Result<const CudaDriver*> load();
  // kSystem: "WHAT: reason (code)".
  [[nodiscard]] Fault fault(const std::string& what, CUresult result) const;
};

}  // namespace moecached
