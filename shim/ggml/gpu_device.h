// Which GPU a ggml device is. ggml numbers devices, and numbers change with CUDA_VISIBLE_DEVICES; the daemon
// knows GPUs by UUID.
//
// The way there: ggml gives the PCI bus id, libcuda (found at run time, $MOECACHED_LIBCUDA names another one)
// turns it into the UUID. Thread: any.
#ifndef MOECACHED_SHIM_GGML_GPU_DEVICE_H_
#define MOECACHED_SHIM_GGML_GPU_DEVICE_H_

#include <array>
#include <cstdint>
#include <string>

#include "ggml-backend-impl.h"

namespace moecached::shim {

using GpuUuid = std::array<uint8_t, 16>;

// "" or a sentence that says why it cannot be told. May make a CUDA context on the device, as ggml does when
// it is asked for properties.
std::string uuid_of(ggml_backend_dev_t device, GpuUuid& out);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_GPU_DEVICE_H_
