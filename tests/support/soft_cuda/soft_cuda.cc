// A CUDA driver made of host memory, for machines without a GPU: enough of libcuda.so.1 for daemon and client
// to run end to end, through the same calls in the same order. "Device memory" is a memfd, streams execute at
// once in the caller, events have always fired. It is stricter than it is clever: what the real driver
// refuses (a mapping of half an allocation, a call without a current context, memory registered twice) it
// refuses too, new device memory holds 0xA5, and access rights are those of mprotect, so that a write through
// a read-only mapping ends the process as it would on a GPU.
//
// Environment: SOFT_CUDA_DEVICES (1 to 8, 1), SOFT_CUDA_UUID (32 hex digits, dashes allowed: that of the
// first device, the last digit counts up), SOFT_CUDA_VRAM (bytes of each, 256 MiB), SOFT_CUDA_NO_HOST_NUMA=1
// (no cuMemCreate of HOST_NUMA memory), SOFT_CUDA_NO_PEERS=1 (no GPU reads another's memory). Thread: any;
// one lock guards the tables.
#include "tests/support/soft_cuda/soft_cuda.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/soft_cuda/entry.h"

namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr int kFresh = 0xa5;
constexpr int kDevicesMax = 8;
const std::string kDeviceName = "soft-cuda-device-";

struct Allocation {
  int fd = -1;
  std::size_t bytes = 0;
  std::size_t counted = 0;  // against the VRAM of a device, in this process
  int device = -1;          // -1: host memory
  ~Allocation();
};

struct Piece {  // of a reservation
  std::size_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
  int protection = PROT_NONE;
};

struct State {
  std::mutex mutex;
  std::array<std::size_t, kDevicesMax> vram_used{};
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Allocation>> handles;
  CUmemGenericAllocationHandle next_handle = 1;
  std::map<std::uintptr_t, std::size_t> reservations, registered;
  struct Linear {
    std::size_t bytes = 0;
    int device = 0;
    int fd = -1;  // of memory that has an IPC handle
  };
  std::map<std::uintptr_t, Linear> linear;
  std::map<std::uintptr_t, std::size_t> opened;  // by IPC handle
  std::map<std::uintptr_t, Piece> pieces;
  std::array<unsigned, kDevicesMax> contexts{};  // references to the primary context of each
  bool tracing = false;
  std::string trace;
  std::map<std::string, CUresult> failures;
  std::array<bool, kDevicesMax> lost{};
  struct {
    unsigned long long k = 0, seen = 0, failed = 0;
    bool each = false;
    CUresult result = CUDA_SUCCESS;
  } every;
  std::string held_function;  // whose next call waits
  bool holds = false;         // one waits
  std::condition_variable released;
};

State& state() {
  static State* const forever = new State;  // threads may outlive static destructors
  return *forever;
}

Allocation::~Allocation() {
  if (fd >= 0) ::close(fd);
  if (counted > 0) state().vram_used[static_cast<std::size_t>(device)] -= counted;
}

struct Context {
} primary[kDevicesMax];
thread_local std::vector<CUcontext> current;

int n_devices() {
  const char* text = std::getenv("SOFT_CUDA_DEVICES");
  return text == nullptr ? 1 : std::clamp(std::atoi(text), 1, kDevicesMax);
}

CUcontext primary_context(CUdevice device) { return reinterpret_cast<CUcontext>(&primary[device]); }

// REQUIRES: a context is current.
std::size_t current_device() {
  return static_cast<std::size_t>(reinterpret_cast<Context*>(current.back()) - primary);
}

std::size_t vram_total() {
  const char* text = std::getenv("SOFT_CUDA_VRAM");
  const unsigned long long bytes = text != nullptr ? std::strtoull(text, nullptr, 0) : 0;
  return bytes > 0 ? bytes : std::size_t{256} << 20;
}

bool no_host_numa() {
  const char* text = std::getenv("SOFT_CUDA_NO_HOST_NUMA");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

bool no_peers() {
  const char* text = std::getenv("SOFT_CUDA_NO_PEERS");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

// Without the version that cuda.h's macros add.
std::string base_name(const char* function) {
  std::string name(function);
  const std::size_t suffix = name.rfind("_v");
  if (suffix != std::string::npos && suffix + 3 == name.size()) name.resize(suffix);
  return name;
}

bool device_ok(CUdevice device) { return device >= 0 && device < n_devices(); }

// Whether [at, at + bytes) lies within one entry.
template <typename Map, typename Size>
bool within(const Map& ranges, std::uintptr_t at, std::size_t bytes, Size size) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return false;
  const auto& found = *std::prev(next);
  return at - found.first <= size(found.second) && bytes <= size(found.second) - (at - found.first);
}
std::size_t plain_size(std::size_t bytes) { return bytes; }

}  // namespace

// Notes the call; what a test has asked to fail, fails.
CUresult soft_cuda_enter(const char* function) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (!s.held_function.empty() && s.held_function == base_name(function)) {
    s.held_function.clear();
    s.holds = true;
    s.released.wait(lock, [&s] { return !s.holds; });
  }
  if (s.tracing) s.trace.append(base_name(function)).push_back('\n');
  if (s.every.k > 0) {
    const unsigned long long n = ++s.every.seen;
    if (s.every.each ? n % s.every.k == 0 : n == s.every.k) {
      ++s.every.failed;
      return s.every.result;
    }
  }
  const auto failure = s.failures.find(base_name(function));
  if (failure == s.failures.end()) return CUDA_SUCCESS;
  const CUresult result = failure->second;
  s.failures.erase(failure);
  return result;
}

CUresult soft_cuda_enter_with_context(const char* function) {
  const CUresult result = soft_cuda_enter(function);
  if (result != CUDA_SUCCESS) return result;
  if (current.empty() || current.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(state().mutex);
  return state().lost[current_device()] ? CUDA_ERROR_ECC_UNCORRECTABLE : CUDA_SUCCESS;
}

// -- for tests
void soft_cuda_trace_start(void) {
  const std::lock_guard lock(state().mutex);
  state().trace.clear();
  state().tracing = true;
}

const char* soft_cuda_trace_stop(void) {
  const std::lock_guard lock(state().mutex);
  state().tracing = false;
  return state().trace.c_str();
}

void soft_cuda_fail_next(const char* function, int result) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = static_cast<CUresult>(result);
}

void soft_cuda_fail_each(unsigned long long k, int each, int result) {
  const std::lock_guard lock(state().mutex);
  state().every = {
      .k = k, .seen = 0, .failed = 0, .each = each != 0, .result = static_cast<CUresult>(result)};
}

void soft_cuda_fail_counts(unsigned long long* seen, unsigned long long* failed) {
  const std::lock_guard lock(state().mutex);
  *seen = state().every.seen;
  *failed = state().every.failed;
}

void soft_cuda_hold_next(const char* function) {
  const std::lock_guard lock(state().mutex);
  state().held_function = function;
}

int soft_cuda_holds(void) {
  const std::lock_guard lock(state().mutex);
  return state().holds ? 1 : 0;
}

void soft_cuda_release(void) {
  const std::lock_guard lock(state().mutex);
  state().held_function.clear();
  state().holds = false;
  state().released.notify_all();
}

void soft_cuda_lose(int device) {
  const std::lock_guard lock(state().mutex);
  if (device < 0) {
    state().lost.fill(false);
  } else {
    state().lost.at(static_cast<std::size_t>(device)) = true;
  }
}

unsigned long long soft_cuda_vram_used(void) {
  const std::lock_guard lock(state().mutex);
  return std::accumulate(state().vram_used.begin(), state().vram_used.end(), std::size_t{0});
}

unsigned long long soft_cuda_objects(void) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.handles.size() + s.reservations.size() + s.pieces.size() + s.registered.size() + s.linear.size() +
         s.opened.size() + std::accumulate(s.contexts.begin(), s.contexts.end(), 0u);
}

// -- driver, devices, contexts
CUresult CUDAAPI cuInit(unsigned) {
  ENTER();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  ENTER();
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  switch (error) {
    case CUDA_SUCCESS:
      *text = "no error";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *text = "invalid argument";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *text = "out of memory";
      break;
    case CUDA_ERROR_INVALID_CONTEXT:
      *text = "invalid device context";
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
      *text = "operation not supported";
      break;
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
      *text = "part or all of the requested memory range is already mapped";
      break;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *text = "an illegal memory access was encountered";
      break;
    default:
      *text = "soft CUDA error";
      break;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_SOFT";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  ENTER();
  *count = n_devices();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER();
  if (!device_ok(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  ENTER();
  if (!device_ok(device)) return CUDA_ERROR_INVALID_DEVICE;
  const char* text = std::getenv("SOFT_CUDA_UUID");
  if (text == nullptr) text = "50f7c0da-0000-0000-0000-000000000001";
  std::string digits;
  for (; *text != '\0'; ++text) {
    if (*text != '-') digits.push_back(*text);
  }
  digits.resize(32, '0');
  for (std::size_t i = 0; i < 16; ++i) {
    uuid->bytes[i] = static_cast<char>(std::strtoul(digits.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  uuid->bytes[15] = static_cast<char>(uuid->bytes[15] + device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
  ENTER();
  if (!device_ok(device) || length < 1) return CUDA_ERROR_INVALID_VALUE;
  std::strncpy(name, "Soft CUDA", static_cast<std::size_t>(length) - 1);
  name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  ENTER();
  if (!device_ok(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = vram_total();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  ENTER();
  if (!device_ok(device) || length < 13) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER();
  if (!device_ok(device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      *value = INT32_MAX;
      break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = no_host_numa() ? 0 : 1;
      break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      *value = 1;
      break;
    default:
      *value = 0;
      break;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER();
  if (!device_ok(device) || !device_ok(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && !no_peers() ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER();
  if (!device_ok(device)) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(state().mutex);
  ++state().contexts[static_cast<std::size_t>(device)];
  *context = primary_context(device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER();
  const std::lock_guard lock(state().mutex);
  if (!device_ok(device) || state().contexts[static_cast<std::size_t>(device)] == 0)
    return CUDA_ERROR_INVALID_CONTEXT;
  --state().contexts[static_cast<std::size_t>(device)];
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  ENTER();
  if (!current.empty()) current.pop_back();
  if (context != nullptr) current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  ENTER();
  *context = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  ENTER_CONTEXT();
  *device = static_cast<CUdevice>(current_device());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  ENTER();
  const auto* given = reinterpret_cast<Context*>(context);
  if (given < primary || given >= primary + n_devices()) return CUDA_ERROR_INVALID_CONTEXT;
  current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  ENTER();
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
  ENTER_CONTEXT();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* free, std::size_t* total) {
  ENTER_CONTEXT();
  const std::lock_guard lock(state().mutex);
  *total = vram_total();
  *free = *total - std::min(*total, state().vram_used[current_device()]);
  return CUDA_SUCCESS;
}

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
