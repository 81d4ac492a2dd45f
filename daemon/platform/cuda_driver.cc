#include "daemon/platform/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace moecached {

Result<const CudaDriver*> CudaDriver::load() {
  static const Result<const CudaDriver*> loaded = []() -> Result<const CudaDriver*> {
    const char* given = std::getenv("MOECACHED_LIBCUDA");
    const char* path = given != nullptr && *given != '\0' ? given : "libcuda.so.1";
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return Fault{FaultCode::kUnsupported, std::string("no NVIDIA driver: ") + ::dlerror()};
    }
    static CudaDriver driver;
#define MOECACHED_CUDA_LOAD(name, symbol)                                                                    \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(library, #symbol));                          \
  if (driver.name == nullptr) {                                                                              \
    return Fault{FaultCode::kUnsupported, std::string(path) + " has no " #symbol ": the driver is too old"}; \
  }
    MOECACHED_CUDA_FUNCTIONS(MOECACHED_CUDA_LOAD)
#undef MOECACHED_CUDA_LOAD
    driver.cuMemcpyBatchAsync =
        reinterpret_cast<CudaDriver::CopyBatch>(::dlsym(library, "cuMemcpyBatchAsync"));
    if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
      Fault fault = driver.fault("starting CUDA", result);
      fault.code = FaultCode::kUnsupported;
      return fault;
    }
    return &driver;
  }();
  if (!loaded) return Fault(loaded.error());
  return *loaded;
}

Fault CudaDriver::fault(const std::string& what, CUresult result) const {
  const char* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  const FaultCode code = result == CUDA_ERROR_OUT_OF_MEMORY ? FaultCode::kLimit : FaultCode::kSystem;
  return Fault{code, what + ": " + text + " (CUDA " + std::to_string(static_cast<int>(result)) + ")"};
}

}  // namespace moecached
