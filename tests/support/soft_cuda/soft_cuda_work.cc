// What is done in streams: copies, writes, waits, events, and the kernels that the client launches. All is
// done when the call returns, whatever the stream.
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/support/soft_cuda/entry.h"

namespace {
constexpr std::size_t kLargePeerCopy = std::size_t{16} << 20;
constexpr std::chrono::milliseconds kLargeCopyTakes{100};
}  // namespace

// -- copies
#define SOFT_CUDA_COPY(name, parameters, to, from) \
  CUresult CUDAAPI name parameters {               \
    ENTER_CONTEXT();                               \
    std::memmove(to, from, bytes);                 \
    return CUDA_SUCCESS;                           \
  }
SOFT_CUDA_COPY(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes), pointer(to), pointer(from))
SOFT_CUDA_COPY(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream), pointer(to),
               pointer(from))
SOFT_CUDA_COPY(cuMemcpyHtoD, (CUdeviceptr to, const void* from, std::size_t bytes), pointer(to), from)
// As large as those by which a link is measured: with several GPUs it is slower than the way between them.
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream) {
  ENTER_CONTEXT();
  if (bytes >= kLargeCopy && std::getenv("SOFT_CUDA_DEVICES") != nullptr)
    std::this_thread::sleep_for(kLargeCopyTakes);
  // What is measured is never looked at.
  if (bytes < kLargeCopy) std::memcpy(pointer(to), from, bytes);
  return CUDA_SUCCESS;
}
SOFT_CUDA_COPY(cuMemcpyDtoH, (void* to, CUdeviceptr from, std::size_t bytes), to, pointer(from))
SOFT_CUDA_COPY(cuMemcpyDtoHAsync, (void* to, CUdeviceptr from, std::size_t bytes, CUstream), to,
               pointer(from))
SOFT_CUDA_COPY(cuMemcpyDtoD, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes), pointer(to),
               pointer(from))
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  ENTER_CONTEXT();
  // What is measured is never looked at, and must not depend on how busy this machine is.
  if (bytes < kLargePeerCopy) std::memmove(pointer(to), pointer(from), bytes);
  return CUDA_SUCCESS;
}

namespace {
CUresult copy_2d(const CUDA_MEMCPY2D* copy) {
  if (copy->WidthInBytes > copy->srcPitch || copy->WidthInBytes > copy->dstPitch)
    return CUDA_ERROR_INVALID_VALUE;
  const auto side = [](CUmemorytype type, const void* host, CUdeviceptr device) {
    return static_cast<const char*>(type == CU_MEMORYTYPE_HOST ? host : pointer(device));
  };
  const char* from = side(copy->srcMemoryType, copy->srcHost, copy->srcDevice) + copy->srcY * copy->srcPitch +
                     copy->srcXInBytes;
  char* to = const_cast<char*>(side(copy->dstMemoryType, copy->dstHost, copy->dstDevice)) +
             copy->dstY * copy->dstPitch + copy->dstXInBytes;
  for (std::size_t row = 0; row < copy->Height; ++row) {
    std::memmove(to + row * copy->dstPitch, from + row * copy->srcPitch, copy->WidthInBytes);
  }
  return CUDA_SUCCESS;
}
}  // namespace

CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D* copy) {
  ENTER_CONTEXT();
  return copy_2d(copy);
}

CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream) {
  ENTER_CONTEXT();
  return copy_2d(copy);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, std::size_t count) {
  ENTER_CONTEXT();
  std::memset(pointer(to), value, count);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count, CUstream) {
  ENTER_CONTEXT();
  std::memset(pointer(to), value, count);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned value, std::size_t count) {
  ENTER_CONTEXT();
  std::fill_n(static_cast<unsigned*>(pointer(to)), count, value);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count, CUstream) {
  ENTER_CONTEXT();
  std::fill_n(static_cast<unsigned*>(pointer(to)), count, value);
  return CUDA_SUCCESS;
}

// -- streams and events
CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned) {
  ENTER_CONTEXT();
  *stream = reinterpret_cast<CUstream>(new int(0));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  ENTER_CONTEXT();
  *stream = reinterpret_cast<CUstream>(new int(0));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  ENTER_CONTEXT();
  delete reinterpret_cast<int*>(stream);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream) {
  ENTER_CONTEXT();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamQuery(CUstream) {
  ENTER_CONTEXT();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream, CUevent event, unsigned) {
  ENTER_CONTEXT();
  return event != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream, CUdeviceptr to, cuuint32_t value, unsigned) {
  ENTER_CONTEXT();
  if (to % sizeof value != 0) return CUDA_ERROR_INVALID_VALUE;
  __atomic_store_n(static_cast<cuuint32_t*>(pointer(to)), value, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

// The caller waits, as all is done when a call returns.
CUresult CUDAAPI cuStreamWaitValue32(CUstream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  ENTER_CONTEXT();
  if (at % sizeof value != 0 || flags != CU_STREAM_WAIT_VALUE_EQ) return CUDA_ERROR_INVALID_VALUE;
  const auto* word = static_cast<const cuuint32_t*>(pointer(at));
  while (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) std::this_thread::yield();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream, CUdeviceptr to, cuuint64_t value, unsigned) {
  ENTER_CONTEXT();
  if (to % sizeof value != 0) return CUDA_ERROR_INVALID_VALUE;
  __atomic_store_n(static_cast<cuuint64_t*>(pointer(to)), value, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream, CUhostFn function, void* data) {
  ENTER_CONTEXT();
  function(data);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned) {
  ENTER_CONTEXT();
  *event = reinterpret_cast<CUevent>(new int(0));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent event) {
  ENTER_CONTEXT();
  delete reinterpret_cast<int*>(event);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream) {
  ENTER_CONTEXT();
  return event != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuEventQuery(CUevent) {
  ENTER_CONTEXT();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventSynchronize(CUevent) {
  ENTER_CONTEXT();
  return CUDA_SUCCESS;
}

// -- batches of copies, in the parameters of CUDA 12.8
#undef cuMemcpyBatchAsync
extern "C" CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes,
                                               std::size_t count, void* attributes, std::size_t* firsts,
                                               std::size_t n_attributes, std::size_t* failed,
                                               CUstream stream) {
  ENTER_CONTEXT();
  // As the real one: no default stream, at least one attribute, and that from the first copy on.
  if (stream == nullptr || count == 0 || attributes == nullptr || n_attributes != 1 || firsts[0] != 0)
    return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) {
    *failed = i;
    if (bytes[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    std::memmove(pointer(to[i]), pointer(from[i]), bytes[i]);
  }
  return CUDA_SUCCESS;
}

// -- kernels: those of client/src/fetch.ptx and wait.ptx, as C++
namespace {

struct Grid {
  unsigned x, y, z, threads;
};
using Kernel = void (*)(const Grid& grid, void** arguments);

template <typename T>
T* memory_at(void* argument) {
  return static_cast<T*>(pointer(*static_cast<CUdeviceptr*>(argument)));
}
std::uint32_t number(void* argument) { return *static_cast<std::uint32_t*>(argument); }

struct FetchPart {
  CUdeviceptr window;
  std::uint64_t stride;
};

void fetch(const Grid& grid, void** arguments) {
  const unsigned n_ids = grid.y, n_parts = grid.z;
  const auto* slots = memory_at<const std::int32_t>(arguments[0]);
  auto* fetched = memory_at<std::int32_t>(arguments[1]);
  const std::uint32_t host_first = number(arguments[2]);
  const std::uint32_t scratch_first = number(arguments[3]);
  const auto* parts = static_cast<const FetchPart*>(arguments[4]);
  for (unsigned i = 0; i < n_ids; ++i) {
    const auto slot = static_cast<std::uint32_t>(slots[i]);
    if (slot < host_first) {
      fetched[i] = slots[i];
      continue;
    }
    const auto first = static_cast<std::uint32_t>(std::find(slots, slots + i, slots[i]) - slots);
    fetched[i] = static_cast<std::int32_t>(scratch_first + first);
    if (first != i) continue;
    for (unsigned p = 0; p < n_parts; ++p) {
      std::memcpy(pointer(parts[p].window + std::uint64_t{scratch_first + first} * parts[p].stride),
                  pointer(parts[p].window + std::uint64_t{slot} * parts[p].stride), parts[p].stride);
    }
  }
}

void ask(const Grid& grid, void** arguments) {
  const auto* ids = memory_at<const std::uint32_t>(arguments[0]);
  auto* asked = memory_at<std::uint32_t>(arguments[1]);
  const std::uint32_t n = number(arguments[2]);
  if (n > grid.threads) std::abort();
  __atomic_store_n(asked, n, __ATOMIC_RELAXED);  // in any order
  for (std::uint32_t i = 0; i < n; ++i) __atomic_store_n(asked + 1 + i, std::min(ids[i], 0xfffffffeU) + 1, __ATOMIC_RELAXED);
}

struct Place {
  std::int32_t slot;
  std::uint32_t reserved;
  std::uint64_t source;
};

void take(const Grid& grid, void** arguments) {
  const std::uint32_t n = number(arguments[2]);
  if (n > grid.threads) std::abort();
  std::memcpy(memory_at<Place>(arguments[1]), memory_at<const Place>(arguments[0]), n * sizeof(Place));
}

struct BringPart {
  CUdeviceptr window;
  std::uint64_t stride;
  std::uint64_t offset;
};

void bring(const Grid& grid, void** arguments) {
  const auto* taken = memory_at<const Place>(arguments[0]);
  auto* slots = memory_at<std::int32_t>(arguments[1]);
  const auto* parts = static_cast<const BringPart*>(arguments[2]);
  for (unsigned i = 0; i < grid.y; ++i) {
    slots[i] = taken[i].slot;
    if (taken[i].source == 0) continue;
    for (unsigned p = 0; p < grid.z; ++p) {
      std::memcpy(pointer(parts[p].window + static_cast<std::uint64_t>(taken[i].slot) * parts[p].stride),
                  pointer(taken[i].source + parts[p].offset), parts[p].stride);
    }
  }
}

constexpr std::pair<std::string_view, Kernel> kKernels[] = {
    {"moecached_fetch", fetch}, {"moecached_ask", ask}, {"moecached_take", take}, {"moecached_bring", bring}};

}  // namespace

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  ENTER_CONTEXT();
  const std::string_view text(static_cast<const char*>(image));
  if (text.find(".version") == text.npos) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(new std::string(text));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  ENTER_CONTEXT();
  delete reinterpret_cast<std::string*>(module);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER_CONTEXT();
  const auto& text = *reinterpret_cast<std::string*>(module);
  if (text.find(".entry " + std::string(name)) == text.npos) return CUDA_ERROR_NOT_FOUND;
  for (const auto& [known, kernel] : kKernels) {
    if (name != known) continue;
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CUstream,
                                void** arguments, void**) {
  ENTER_CONTEXT();
  const auto is_it = [&](const auto& known) {
    return function == reinterpret_cast<CUfunction>(known.second);
  };
  if (std::ranges::none_of(kKernels, is_it)) return CUDA_ERROR_INVALID_HANDLE;
  if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0 || block_x > 1024)
    return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<Kernel>(function)({grid_x, grid_y, grid_z, block_x}, arguments);
  return CUDA_SUCCESS;
}
