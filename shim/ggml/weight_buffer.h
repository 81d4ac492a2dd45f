// The buffer type "MOECACHE": addresses for expert tensors, without memory behind them.
//
// A buffer is a PROT_NONE reservation. A tensor whose bytes the daemon serves stays that way and gets a
// window tensor; any other tensor placed here (LoRA for experts, a file the daemon refused) is left out: its
// pages become real memory and stock code computes with it, on the CPU. The addresses identify tensors: names
// do not, a draft model has the same. Thread: loading writes, graphs read; a buffer is complete before any
// graph uses it.
#ifndef MOECACHED_SHIM_GGML_WEIGHT_BUFFER_H_
#define MOECACHED_SHIM_GGML_WEIGHT_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ggml-backend-impl.h"
#include "shim/ggml/gpu_model.h"
#include "shim/ggml/model.h"
#include "shim/ggml/spill_model.h"

namespace moecached::shim {

// A tensor served by the daemon, and the model that keeps it: in slots of RAM, of GPUs, or of both. The
// others are null.
struct ServedTensor {
  std::shared_ptr<Model> model;
  const WindowTensor* window = nullptr;
  std::shared_ptr<GpuExperts> gpu;
  std::size_t gpu_index = 0;  // of the tensor, in its GpuWindows
  std::shared_ptr<SpillExperts> spill;
  std::size_t spill_index = 0;

  // Reads bytes of the tensor from the file. False on an I/O error.
  bool read(uint64_t offset, void* out, std::size_t bytes) const;
};

ggml_backend_buffer_type_t weight_buffer_type();
// Sets the device that owns the buffer type. Before anything is allocated.
void set_weight_buffer_device(ggml_backend_dev_t device);

bool is_in_weight_buffer(const ggml_tensor* tensor);
// REQUIRES: is_in_weight_buffer(tensor). nullptr for a tensor that was left out.
const ServedTensor* served_tensor(const ggml_tensor* tensor);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_WEIGHT_BUFFER_H_
