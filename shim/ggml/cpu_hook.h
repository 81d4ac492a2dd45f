// Hooks the host's CPU device in place.
//
// ggml's device, registry and backend objects hold their function tables by value, so the tables of the CPU
// device can be written to: it then accepts our buffer type, and each backend it makes gets a BackendHook. A
// device of our own instead would cut the graph at every expert operation. Thread: hook_cpu_device() once,
// under ggml's backend registration.
#ifndef MOECACHED_SHIM_GGML_CPU_HOOK_H_
#define MOECACHED_SHIM_GGML_CPU_HOOK_H_

#include "ggml-backend-impl.h"

namespace moecached::shim {

// Idempotent.
void hook_cpu_device(ggml_backend_dev_t cpu);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CPU_HOOK_H_
