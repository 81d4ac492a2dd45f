#include "client/src/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "client/src/error.h"

namespace moecached::client {
namespace {

struct Loaded {
  CudaDriver driver;
  std::string reason;  // empty: it works

  Loaded() {
    const char* path = std::getenv("MOECACHED_LIBCUDA");
    if (path == nullptr || *path == '\0') path = "libcuda.so.1";
    // Never closed: the driver has threads and exit handlers of its own.
    void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* text = ::dlerror();
      reason = std::string("no CUDA driver on this machine: ") + (text != nullptr ? text : path);
      return;
    }
#define MOECACHED_CUDA_LOAD(name)                                                               \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(library, #name));               \
  if (driver.name == nullptr) {                                                                 \
    reason = std::string(path) + " has no " #name ": a driver of CUDA 12.2 or later is needed"; \
    return;                                                                                     \
  }
    MOECACHED_CUDA_FUNCTIONS(MOECACHED_CUDA_LOAD)
#undef MOECACHED_CUDA_LOAD
    const CUresult result = driver.cuInit(0);
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
    reason = "the CUDA driver does not start: " + std::string(text != nullptr ? text : "unknown error") +
             " (" + std::to_string(static_cast<int>(result)) + ")";
  }
};

const Loaded& loaded() {
  static const Loaded once;
  return once;
}

}  // namespace

moecached_status load_cuda() {
  const Loaded& library = loaded();
  return library.reason.empty() ? MOECACHED_OK : fail(MOECACHED_E_UNAVAILABLE, "%s", library.reason.c_str());
}

const CudaDriver& cuda() noexcept { return loaded().driver; }

moecached_status check_cuda(CUresult result, const char* what) noexcept {
  if (result == CUDA_SUCCESS) return MOECACHED_OK;
  const char* text = nullptr;
  if (cuda().cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  return fail(MOECACHED_E_SYSTEM, "cannot %s: %s (CUDA error %d)", what, text, static_cast<int>(result));
}

moecached_status CudaContext::open(const GpuUuid& uuid, std::shared_ptr<CudaContext>* out) {
  int n_devices = 0;
  if (const auto status = check_cuda(cuda().cuDeviceGetCount(&n_devices), "count the GPUs")) return status;
  for (int i = 0; i < n_devices; ++i) {
    CUdevice device = 0;
    CUuuid found{};
    if (const auto status = check_cuda(cuda().cuDeviceGet(&device, i), "look at a GPU")) return status;
    if (const auto status = check_cuda(cuda().cuDeviceGetUuid_v2(&found, device), "name a GPU"))
      return status;
    static_assert(sizeof found.bytes == MOECACHED_UUID_BYTES);
    if (std::memcmp(found.bytes, uuid.data(), uuid.size()) != 0) continue;
    CUcontext context = nullptr;
    if (const auto status =
            check_cuda(cuda().cuDevicePrimaryCtxRetain(&context, device), "use the GPU's primary context")) {
      return status;
    }
    *out = std::make_shared<CudaContext>(device, context);
    return MOECACHED_OK;
  }
  return fail(MOECACHED_E_ARGUMENT, "none of the %d GPUs that this process sees has that UUID", n_devices);
}

CudaContext::~CudaContext() { cuda().cuDevicePrimaryCtxRelease_v2(device_); }

int CudaContext::attribute(CUdevice_attribute which) const noexcept {
  int value = 0;
  return cuda().cuDeviceGetAttribute(&value, which, device_) == CUDA_SUCCESS ? value : 0;
}

moecached_status HostRegistration::open(std::shared_ptr<CudaContext> context, std::span<std::byte> memory,
                                        unsigned flags, std::shared_ptr<HostRegistration>* out) {
  const ScopedContext current(*context);
  if (const auto status = current.status()) return status;
  const std::size_t page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t bytes = (memory.size() + page_bytes - 1) / page_bytes * page_bytes;
  if (const auto status =
          check_cuda(cuda().cuMemHostRegister_v2(memory.data(), bytes, flags),
                     "page-lock memory shared with the daemon (is there a limit, ulimit -l?)")) {
    return status;
  }
  *out = std::make_shared<HostRegistration>(std::move(context), memory.data());
  return MOECACHED_OK;
}

HostRegistration::~HostRegistration() {
  const ScopedContext current(*context_);
  cuda().cuMemHostUnregister(address_);
}

}  // namespace moecached::client
