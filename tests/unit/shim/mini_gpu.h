// Two GPUs in miniature: ggml devices of a registry "CUDA" whose memory is this process's, so that windows,
// slot tables and slots can be looked at, and expert operations be computed by the mini host.
#ifndef MOECACHED_TESTS_UNIT_SHIM_MINI_GPU_H_
#define MOECACHED_TESTS_UNIT_SHIM_MINI_GPU_H_

#include <cstddef>

#include "ggml-backend-impl.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {

ggml_backend_reg_t mini_gpu_registry();
// "CUDA0" and "CUDA1". Events, and what their backends do, are written to fake_daemon().calls.
ggml_backend_dev_t mini_gpu(std::size_t index);

struct MiniGpuFaults {
  bool no_events = false;
  bool no_memory = false;
  ggml_status compute = GGML_STATUS_SUCCESS;
};
MiniGpuFaults& mini_gpu_faults();

// Buffers of GPU memory, and events, that live.
std::size_t mini_gpu_buffers();
std::size_t mini_gpu_events();

// A backend whose graph_compute is MiniBackend's.
void make_gpu_backend(MiniBackend& mini, ggml_backend_dev_t device);

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_MINI_GPU_H_
