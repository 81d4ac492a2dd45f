// The driver itself, its devices and their contexts.
#include <cuda.h>
#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "tests/support/soft_cuda/state.h"

using namespace soft_cuda;

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
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
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
