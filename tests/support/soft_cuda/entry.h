// How every function of the soft CUDA driver begins, for its source files alone.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

// As large as the copies and blocks that a link is measured with, which nobody looks into.
inline constexpr std::size_t kLargeCopy = std::size_t{64} << 20;

// Notes the call; what a test has asked to fail, fails.
CUresult soft_cuda_enter(const char* function);
// The same, and a context must be current.
CUresult soft_cuda_enter_with_context(const char* function);

#define ENTER() \
  if (const CUresult entered = soft_cuda_enter(__func__); entered != CUDA_SUCCESS) return entered
#define ENTER_CONTEXT() \
  if (const CUresult entered = soft_cuda_enter_with_context(__func__); entered != CUDA_SUCCESS) return entered

inline void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}
inline CUdeviceptr address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }
