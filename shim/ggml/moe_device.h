// Device "MOECACHE": an ACCEL device that owns the weight buffer type and computes nothing.
//
// Why it exists: the loader offers the default buffer types of ACCEL devices for weights first, and `-ot`
// knows buffer types by device. Why it computes nothing: the graph must stay one split on the CPU backend,
// whose graph_compute is hooked.
#ifndef MOECACHED_SHIM_GGML_MOE_DEVICE_H_
#define MOECACHED_SHIM_GGML_MOE_DEVICE_H_

#include "ggml-backend-impl.h"

namespace moecached::shim {

// The registry to hand to ggml, with the one device.
ggml_backend_reg_t moe_registry();

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_MOE_DEVICE_H_
