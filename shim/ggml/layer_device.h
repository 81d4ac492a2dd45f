// On which device the host has placed the layer of an expert operation. Expert tensors do not tell: our
// buffer type is of no GPU, and every GPU supports it, so with several of them the host would give all expert
// operations to the first. The router's weights do tell. Pure. Thread: any.
#ifndef MOECACHED_SHIM_GGML_LAYER_DEVICE_H_
#define MOECACHED_SHIM_GGML_LAYER_DEVICE_H_

#include "ggml-backend-impl.h"
#include "ggml.h"

namespace moecached::shim {

// The device that owns the memory of the router's weights, found from the operation's ids upwards: top-k,
// softmax and what else is between. nullptr: it cannot be told; a host that only measures has not placed them
// yet.
ggml_backend_dev_t device_of_router(const ggml_tensor& expert_op);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_LAYER_DEVICE_H_
