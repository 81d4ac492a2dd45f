// A CUDA driver that shows the first GPU of a machine twice, so that what several GPUs do together can be
// tried with real kernels where there is one. $MOECACHED_LIBCUDA names it to the daemon and to clients; the
// engine goes on to use the real driver, for which there is one GPU: a process whose engine is to be on the
// second one has ONE_GPU_TWICE_AS=1 in its environment.
//
//   ordinal 0: the GPU          ordinal 1: the same, its UUID with another last byte
//
// Memory and context of both are those of the GPU, so the way between them is as fast as its own memory. What
// is not here is found in the real driver, which this library depends on. Thread: any.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

namespace {

constexpr int kTwins = 2;

template <typename Function>
Function real(const char* name) {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // loaded already
  if (library == nullptr) std::abort();
  void* const found = ::dlsym(library, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function>(found);
}

// By the name of its version, which cuda.h's macros put in.
#define NAME_OF(function) #function
#define VERSIONED(function) NAME_OF(function)
#define REAL(function) real<decltype(&(function))>(VERSIONED(function))

CUmemLocation of_the_first(CUmemLocation location) {
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) location.id = 0;
  return location;
}

}  // namespace

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  const CUresult result = REAL(cuDeviceGetCount)(count);
  if (result == CUDA_SUCCESS && *count > 0) *count = kTwins;
  return result;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kTwins) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
  const CUresult result = REAL(cuDeviceGetByPCIBusId)(device, id);
  const char* as = std::getenv("ONE_GPU_TWICE_AS");
  if (result == CUDA_SUCCESS) *device = as != nullptr && std::string_view(as) == "1" ? 1 : 0;
  return result;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const CUresult result = REAL(cuDeviceGetUuid)(uuid, 0);
  if (result == CUDA_SUCCESS && device == 1) uuid->bytes[15] = static_cast<char>(uuid->bytes[15] ^ 1);
  return result;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice) {
  return REAL(cuDeviceGetName)(name, length, 0);
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return REAL(cuDeviceGetAttribute)(value, attribute, 0);
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  *can = device != peer ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return REAL(cuDevicePrimaryCtxRetain)(context, 0);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice) { return REAL(cuDevicePrimaryCtxRelease)(0); }

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* wanted,
                                               CUmemAllocationGranularity_flags option) {
  CUmemAllocationProp properties = *wanted;
  properties.location = of_the_first(properties.location);
  return REAL(cuMemGetAllocationGranularity)(granularity, &properties, option);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                             const CUmemAllocationProp* wanted, unsigned long long flags) {
  CUmemAllocationProp properties = *wanted;
  properties.location = of_the_first(properties.location);
  return REAL(cuMemCreate)(handle, bytes, &properties, flags);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* wanted,
                                std::size_t count) {
  if (count != 1) return CUDA_ERROR_NOT_SUPPORTED;  // this project asks for one at a time
  CUmemAccessDesc access = *wanted;
  access.location = of_the_first(access.location);
  return REAL(cuMemSetAccess)(address, bytes, &access, 1);
}
