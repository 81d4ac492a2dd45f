// Hooks the host's CUDA devices in place, as cpu_hook.h does the CPU device.
//
// A device then accepts our buffer type for the operands of expert operations, and each backend it makes gets
// a CudaBackendHook. KV cache, flash attention, fit and fusion stay stock, since it is stock's device.
// Thread: hook_cuda_devices() once, under ggml's backend registration.
#ifndef MOECACHED_SHIM_GGML_CUDA_HOOK_H_
#define MOECACHED_SHIM_GGML_CUDA_HOOK_H_

#include <string>

#include "ggml-backend-impl.h"

namespace moecached::shim {

// REQUIRES for both: the host API is resolved.
bool has_cuda_device();
// Hooks all of them. A model's experts are opened on the GPU that the host has given memory last, the first
// if there is none, and computed on the one that has the layer's router. Returns "" or a sentence that says
// why not; nothing is hooked then. Idempotent. With MOECACHED_EXTRA_BUFTS=1 the loader is offered our buffer
// type for all expert tensors, without -ot.
std::string hook_cuda_devices();

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CUDA_HOOK_H_
