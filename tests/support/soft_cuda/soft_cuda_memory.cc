// Memory: allocations that are mapped piece by piece, plain ones, legacy IPC, and host memory that is
// registered.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include "tests/support/soft_cuda/state.h"

using namespace soft_cuda;

namespace {
const std::string kDeviceName = "soft-cuda-device-";
}  // namespace

// -- virtual memory
CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp*,
                                               CUmemAllocationGranularity_flags) {
  ENTER();
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                             const CUmemAllocationProp* properties, unsigned long long) {
  ENTER();
  const bool device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const bool host = properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
  if (bytes == 0 || bytes % kGranularity != 0 || (!device && !host)) return CUDA_ERROR_INVALID_VALUE;
  if (host && no_host_numa()) return CUDA_ERROR_NOT_SUPPORTED;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (device && !device_ok(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  std::size_t& used = s.vram_used[static_cast<std::size_t>(device ? properties->location.id : 0)];
  if (device && used + bytes > vram_total()) return CUDA_ERROR_OUT_OF_MEMORY;
  auto allocation = std::make_shared<Allocation>();
  // The name goes with the descriptor into other processes.
  const std::string name = device ? kDeviceName + std::to_string(properties->location.id) : "soft-cuda-host";
  allocation->fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (allocation->fd < 0 || ::ftruncate(allocation->fd, static_cast<off_t>(bytes)) != 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  allocation->bytes = bytes;
  if (device) {
    void* const content = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation->fd, 0);
    if (content == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(content, kFresh, bytes);
    ::munmap(content, bytes);
    allocation->counted = bytes;
    allocation->device = properties->location.id;
    used += bytes;
  }
  *handle = s.next_handle++;
  s.handles[*handle] = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER();
  const std::lock_guard lock(state().mutex);
  return state().handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long) {
  ENTER();
  const std::lock_guard lock(state().mutex);
  const auto found = state().handles.find(handle);
  if (found == state().handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::fcntl(found->second->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &fd, sizeof fd);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                                CUmemAllocationHandleType type) {
  ENTER();
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::fcntl(static_cast<int>(reinterpret_cast<std::uintptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  struct stat facts {};
  if (fd < 0 || ::fstat(fd, &facts) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = std::make_shared<Allocation>();
  allocation->fd = fd;
  allocation->bytes = static_cast<std::size_t>(facts.st_size);
  char link[64] = "";
  (void)!::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link, sizeof link - 1);
  if (const char* const at = std::strstr(link, kDeviceName.c_str()); at != nullptr)
    allocation->device = std::atoi(at + kDeviceName.size());
  const std::lock_guard lock(state().mutex);
  *handle = state().next_handle++;
  state().handles[*handle] = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* out, std::size_t bytes, std::size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags) {
  ENTER();
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 || (alignment & (alignment - 1)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max(alignment, kGranularity);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = MAP_FAILED;
  if (hint != 0 && hint % alignment == 0)
    at = ::mmap(pointer(hint), bytes, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
  if (at == MAP_FAILED) {
    char* const wide = static_cast<char*>(::mmap(nullptr, bytes + alignment, PROT_NONE, kFlags, -1, 0));
    if (wide == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char* const aligned =
        static_cast<char*>(pointer((address(wide) + alignment - 1) / alignment * alignment));
    if (aligned > wide) ::munmap(wide, static_cast<std::size_t>(aligned - wide));
    ::munmap(aligned + bytes, static_cast<std::size_t>(wide + alignment - aligned));
    at = aligned;
  }
  *out = address(at);
  const std::lock_guard lock(state().mutex);
  state().reservations[*out] = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr at, std::size_t bytes) {
  ENTER();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.reservations.find(at);
  if (found == s.reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto piece = s.pieces.lower_bound(at);
  if (piece != s.pieces.end() && piece->first < at + bytes) return CUDA_ERROR_INVALID_VALUE;
  s.reservations.erase(found);
  ::munmap(pointer(at), bytes);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr at, std::size_t bytes, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.handles.find(handle);
  if (found == s.handles.end() || offset != 0 || flags != 0 || bytes != found->second->bytes ||
      at % kGranularity != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (!within(s.reservations, at, bytes, plain_size)) return CUDA_ERROR_INVALID_VALUE;
  const auto next = s.pieces.lower_bound(at);
  if (next != s.pieces.end() && next->first < at + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != s.pieces.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at)
    return CUDA_ERROR_INVALID_VALUE;
  if (::mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  s.pieces[at] = {bytes, found->second, PROT_NONE};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, std::size_t bytes) {
  ENTER();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto first = s.pieces.find(at);
  std::size_t covered = 0;
  auto last = first;
  while (last != s.pieces.end() && last->first == at + covered && covered < bytes)
    covered += (last++)->second.bytes;
  if (first == s.pieces.end() || covered != bytes) return CUDA_ERROR_INVALID_VALUE;
  ::mmap(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  s.pieces.erase(first, last);
  return CUDA_SUCCESS;
}

// CPU and GPU are one here, so whoever is given more decides.
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* wanted,
                                std::size_t count) {
  ENTER();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::size_t covered = 0;
  for (auto piece = s.pieces.find(at); covered < bytes; ++piece) {
    if (piece == s.pieces.end() || piece->first != at + covered) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned flags = wanted[i].flags;
      const int owner = piece->second.allocation->device;
      if (wanted[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && owner >= 0 &&
          wanted[i].location.id != owner && no_peers())
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
      if ((flags & CU_MEM_ACCESS_FLAGS_PROT_READ) != 0) piece->second.protection |= PROT_READ;
      if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) piece->second.protection |= PROT_READ | PROT_WRITE;
    }
    if (::mprotect(pointer(piece->first), piece->second.bytes, piece->second.protection) != 0)
      return CUDA_ERROR_OPERATING_SYSTEM;
    covered += piece->second.bytes;
  }
  return covered == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// -- plain memory
CUresult CUDAAPI cuMemAlloc(CUdeviceptr* out, std::size_t bytes) {
  ENTER_CONTEXT();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::size_t& used = s.vram_used[current_device()];
  if (used + bytes > vram_total()) return CUDA_ERROR_OUT_OF_MEMORY;
  // Whole granules have a block of their own in the real driver as well: only those are fit to be shared.
  void* memory = nullptr;
  int fd = -1;
  if (bytes % kGranularity == 0) {
    fd = ::memfd_create("soft-cuda-linear", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (bytes < kLargeCopy) std::memset(memory, kFresh, bytes);
  *out = address(memory);
  s.linear[*out] = {bytes, static_cast<int>(current_device()), fd};
  used += bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr at) {
  ENTER_CONTEXT();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.linear.find(at);
  if (found == s.linear.end()) return at == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  const State::Linear block = found->second;
  s.vram_used[static_cast<std::size_t>(block.device)] -= block.bytes;
  s.linear.erase(found);
  if (block.fd >= 0) {
    ::munmap(pointer(at), block.bytes);
    ::close(block.fd);
  } else {
    std::free(pointer(at));
  }
  return CUDA_SUCCESS;
}

// -- legacy IPC. A handle names the exporter's descriptor, so it means nothing in another PID namespace
// either.
namespace {

constexpr std::uint64_t kHandleMagic = 0x4350494146544f53;
struct SoftHandle {
  std::uint64_t magic;
  std::int32_t pid, fd, device, reserved;
  std::uint64_t bytes;
};
static_assert(sizeof(SoftHandle) <= sizeof(CUipcMemHandle));

}  // namespace

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr at) {
  ENTER_CONTEXT();
  const std::lock_guard lock(state().mutex);
  const auto found = state().linear.find(at);
  if (found == state().linear.end() || found->second.fd < 0) return CUDA_ERROR_INVALID_VALUE;
  const SoftHandle handle{.magic = kHandleMagic,
                          .pid = ::getpid(),
                          .fd = found->second.fd,
                          .device = found->second.device,
                          .reserved = 0,
                          .bytes = found->second.bytes};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &handle, sizeof handle);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle from, unsigned) {
  ENTER_CONTEXT();
  SoftHandle handle;
  std::memcpy(&handle, &from, sizeof handle);
  if (handle.magic != kHandleMagic) return CUDA_ERROR_INVALID_VALUE;
  // As the real driver: not in the process that made it, nor on another GPU.
  if (handle.pid == ::getpid() || handle.device != static_cast<int>(current_device()))
    return CUDA_ERROR_INVALID_CONTEXT;
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  void* const at = ::mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = address(at);
  const std::lock_guard lock(state().mutex);
  state().opened[*out] = handle.bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr at) {
  ENTER_CONTEXT();
  const std::lock_guard lock(state().mutex);
  const auto found = state().opened.find(at);
  if (found == state().opened.end()) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(pointer(at), found->second);
  state().opened.erase(found);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostRegister(void* memory, std::size_t bytes, unsigned) {
  ENTER_CONTEXT();
  const std::uintptr_t at = address(memory);
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (memory == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::vector<unsigned char> resident((at % page + bytes + page - 1) / page);
  if (::mincore(pointer(at / page * page), at % page + bytes, resident.data()) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto next = s.registered.lower_bound(at);
  const bool meets_next = next != s.registered.end() && next->first < at + bytes;
  const bool meets_last =
      next != s.registered.begin() && std::prev(next)->first + std::prev(next)->second > at;
  if (meets_next || meets_last) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  s.registered[at] = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostUnregister(void* memory) {
  ENTER_CONTEXT();
  const std::lock_guard lock(state().mutex);
  return state().registered.erase(address(memory)) == 1 ? CUDA_SUCCESS
                                                        : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* out, void* memory, unsigned) {
  ENTER_CONTEXT();
  const std::lock_guard lock(state().mutex);
  if (!within(state().registered, address(memory), 1, plain_size)) return CUDA_ERROR_INVALID_VALUE;
  *out = address(memory);
  return CUDA_SUCCESS;
}
