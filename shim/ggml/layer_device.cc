#include "shim/ggml/layer_device.h"

namespace moecached::shim {
namespace {

// More than any router of llama.cpp v0.5.0 has between its logits and the ids (groups of experts: 14).
constexpr int kStepsMax = 32;

}  // namespace

ggml_backend_dev_t device_of_router(const ggml_tensor& expert_op) {
  const ggml_tensor* at = expert_op.src[2];  // ids, of MUL_MAT_ID and of ADD_ID
  for (int step = 0; step < kStepsMax && at != nullptr; ++step) {
    if (at->op == GGML_OP_MUL_MAT) {
      const ggml_tensor* weights = at->src[0];
      if (weights == nullptr) return nullptr;
      const ggml_backend_buffer* buffer =
          weights->view_src != nullptr ? weights->view_src->buffer : weights->buffer;
      return buffer == nullptr ? nullptr : buffer->buft->device;
    }
    at = at->view_src != nullptr && at->src[0] == nullptr ? at->view_src : at->src[0];
  }
  return nullptr;
}

}  // namespace moecached::shim
