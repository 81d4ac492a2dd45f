// One hooked CUDA backend of the host: a lane for each model it computes with, and the graph compute in front
// of stock's.
//
// An epoch is one graph:
//   lane begin -> the stream waits until the slots of the last epoch are logged -> stock's graph with the
//   plan's nodes -> event behind it -> lane submit
// Nothing here waits for the GPU, but for growing the slots and for the end. Thread: one graph at a time, as
// for any ggml backend. Memory: device memory for slots, a few 100 KiB at 512 tokens a batch; 32 plans.
#ifndef MOECACHED_SHIM_GGML_CUDA_BACKEND_HOOK_H_
#define MOECACHED_SHIM_GGML_CUDA_BACKEND_HOOK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-backend-impl.h"
#include "moecached/moecached.h"
#include "shim/ggml/cuda_plan.h"
#include "shim/ggml/gpu_model.h"
#include "shim/ggml/spill_runner.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {

class CudaBackendHook {
 public:
  // stock: the backend's functions before it was hooked.
  CudaBackendHook(ggml_backend_t backend, const ggml_backend_i& stock)
      : backend_(backend), stock_(stock), spill_(backend_, stock_) {}
  // REQUIRES: the backend still lives.
  ~CudaBackendHook();
  CudaBackendHook(const CudaBackendHook&) = delete;
  CudaBackendHook& operator=(const CudaBackendHook&) = delete;

  ggml_status compute(ggml_cgraph* graph);

 private:
  struct Lane {
    std::shared_ptr<GpuExperts> experts;
    std::shared_ptr<GpuModel> model;
    std::shared_ptr<const GpuWindows> windows;
    moecached_gpu_lane* lane = nullptr;
    ggml_backend_event_t done = nullptr;    // behind the last kernel of the graph
    ggml_backend_event_t logged = nullptr;  // the client has read the slots
    SlotsMemory slots;
    uint32_t small_graphs = 0;        // of few tokens, with experts that may be in RAM
    uint64_t scratch_generation = 0;  // of the windows when scratch slots were last asked for
  };
  struct CachedPlan {
    CudaPlan plan;
    bool is_found = false;
    std::vector<std::shared_ptr<const GpuWindows>> windows;  // that it points into
    uint64_t used = 0;
  };

  CachedPlan& cached_for(const ggml_cgraph& graph);
  bool find(CachedPlan& cached, const ggml_cgraph& graph);
  bool is_current(const CachedPlan& cached) const;
  const GpuWindow* window_of(const ggml_tensor& weight);
  Lane* lane_of(const ServedTensor& served);
  Lane& lane_of(const CudaPlan::Share& share);
  void free_lane(Lane& lane);
  bool refresh();

  ggml_status run(CachedPlan& cached, const ggml_cgraph& graph);
  bool begin(const CudaPlan& plan);
  bool place(CudaPlan& plan);
  bool grow(Lane& lane, std::size_t bytes);
  void submit(Lane& lane, const CudaPlan::Share* share);
  void ask_for_scratch(Lane& lane, const CudaPlan::Share& share);

  const ggml_backend_t backend_;
  const ggml_backend_i stock_;
  SpillRunner spill_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // a backend computes with one model, seldom two
  bool find_failed_ = false;                  // for window_of()
  SlotsNodePool pool_;
  std::vector<std::unique_ptr<CachedPlan>> plans_;
  CachedPlan unnamed_;  // graphs without a number
  uint64_t now_ = 0;
  std::vector<SlotsMemory> memory_;  // of the graph at hand, by share
  std::vector<Lane*> begun_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CUDA_BACKEND_HOOK_H_
