// Scratch slots of one mapping, and the kernel that fills them: the experts which a graph is about to read
// from RAM are copied into device memory first, all parts of all experts of a layer in one kernel, and read
// from there. Why: see fetch.ptx. What is on the GPU already is left where it is, and is read from there.
//
// One lane uses them: kernels of another one would overwrite what this one still reads. Thread: fetch()
// belongs to that lane's thread; the rest under the session's lock. Memory: a few tens of MiB of device
// memory; owns it, its mappings and the kernel. The windows must outlive it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/cuda_driver.h"
#include "client/src/gpu_segment.h"
#include "client/src/scratch_plan.h"

namespace moecached::client {

class GpuScratch {
 public:
  // windows: the address of each part's window, reserved as far as the plan says. MOECACHED_E_UNAVAILABLE: no
  // device memory is free, or the driver cannot take the kernel; all goes on without.
  [[nodiscard]] static moecached_status open(const CudaContext& context, const GpuLayout& layout,
                                             const ScratchPlan& plan, const std::vector<CUdeviceptr>& windows,
                                             std::unique_ptr<GpuScratch>* out);
  ~GpuScratch();  // the context is current, and nothing of the lane is under way
  GpuScratch(const GpuScratch&) = delete;
  GpuScratch& operator=(const GpuScratch&) = delete;

  [[nodiscard]] std::uint32_t n_slots() const noexcept { return plan_.n_slots; }
  // The first id behind the layer's scratch slots, in the whole window.
  [[nodiscard]] std::uint32_t slots_end(std::uint32_t layer) const {
    return plan_.first[layer] + plan_.n_slots;
  }
  // Enqueues the kernel; the context is current. No allocation, no lock.
  [[nodiscard]] moecached_status fetch(const moecached_gpu_fetch& request) const;

 private:
  GpuScratch(const GpuLayout& layout, const ScratchPlan& plan, const std::vector<CUdeviceptr>& windows)
      : layout_(layout), plan_(plan), windows_(windows) {}
  moecached_status load_kernel();
  moecached_status map_memory(const CudaContext& context);
  moecached_status first_launch() const;

  struct Piece {
    CUdeviceptr address;
    std::uint64_t bytes;
  };
  const GpuLayout& layout_;
  const ScratchPlan& plan_;
  const std::vector<CUdeviceptr> windows_;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  std::vector<Piece> pieces_;
};

}  // namespace moecached::client
