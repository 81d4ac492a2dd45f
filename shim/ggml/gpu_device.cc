#include "shim/ggml/gpu_device.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace moecached::shim {
namespace {

// Of cuda.h, which is not needed to build the plugin.
using CuInit = int (*)(unsigned flags);
using CuDeviceGetByPciBusId = int (*)(int* device, const char* bus_id);
struct CuUuid {
  char bytes[16];
};
using CuDeviceGetUuid = int (*)(CuUuid* uuid, int device);

template <typename Function>
Function function(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

std::string uuid_of(ggml_backend_dev_t device, GpuUuid& out) {
  ggml_backend_dev_props props = {};
  device->iface.get_props(device, &props);
  if (props.device_id == nullptr) {
    return std::string(device->iface.get_name(device)) +
           " has no PCI bus id, so the daemon cannot be told which GPU it is";
  }
  const char* named = std::getenv("MOECACHED_LIBCUDA");
  const char* path = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // stays loaded: ggml-cuda has it anyway
  if (library == nullptr) return std::string("no CUDA driver library: ") + dlerror();
  const auto init = function<CuInit>(library, "cuInit");
  const auto by_bus_id = function<CuDeviceGetByPciBusId>(library, "cuDeviceGetByPCIBusId");
  // Version 2 gives the UUID of a MIG slice where the device is one.
  const auto get_uuid = function<CuDeviceGetUuid>(library, "cuDeviceGetUuid_v2");
  if (init == nullptr || by_bus_id == nullptr || get_uuid == nullptr) {
    return std::string(path) + " is too old: it has no cuDeviceGetUuid_v2 (driver 470 or newer is needed)";
  }
  int index = 0;
  CuUuid uuid = {};
  int error = init(0);
  if (error == 0) error = by_bus_id(&index, props.device_id);
  if (error == 0) error = get_uuid(&uuid, index);
  if (error != 0) {
    return std::string("the CUDA driver does not tell the UUID of ") + device->iface.get_name(device) + " (" +
           props.device_id + "): error " + std::to_string(error);
  }
  std::memcpy(out.data(), uuid.bytes, out.size());
  return "";
}

}  // namespace moecached::shim
