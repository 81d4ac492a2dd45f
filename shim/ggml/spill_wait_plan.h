// A copy of a graph of a model that spills, which is launched whole and waits on the GPU at each MoE layer.
//
//   host's nodes:  ... topk  MUL_MAT_ID(gate)  MUL_MAT_ID(up)  ...  MUL_MAT_ID(down) ...
//   plan's nodes:  ... topk  [GET_ROWS]  CONT  MUL_MAT_ID'  MUL_MAT_ID'  ...  MUL_MAT_ID' ...
//
// In place of the CONT cuda_fetch.h enqueues the wait and what follows it; its result is where to read the
// experts. Unlike the CONT of cuda_plan.h it must be replaced: the ids themselves are no slots. Ids of
// several tokens are a view with gaps, for which stock copies in other ways: a GET_ROWS on an identity table
// makes them dense.
//
// Pure: it calls neither ggml nor CUDA. Thread: the backend's. Memory: SlotsNodePool.
#ifndef MOECACHED_SHIM_GGML_SPILL_WAIT_PLAN_H_
#define MOECACHED_SHIM_GGML_SPILL_WAIT_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "shim/ggml/cuda_plan.h"

namespace moecached::shim {

class SpillWaitPlan {
 public:
  static constexpr std::size_t kPitch = 256;       // bytes: the ids of one layer
  static constexpr std::size_t kLayersMax = 4096;  // of a model, as the daemon serves them
  static constexpr std::size_t kExpertsMax = 4096;

  // Device memory: for each layer its slots, then for each its dense ids, then the identity table.
  struct Memory {
    ggml_backend_buffer_t buffer = nullptr;
    uint64_t address = 0;
    uint64_t generation = 0;  // of the windows
    static constexpr std::size_t kBytes = 2 * kLayersMax * kPitch + kExpertsMax * sizeof(int32_t);
    uint64_t slots(uint32_t layer) const { return address + layer * kPitch; }
    uint64_t dense(uint32_t layer) const { return address + (kLayersMax + layer) * kPitch; }
    uint64_t identity() const { return address + 2 * kLayersMax * kPitch; }
  };
  struct Layer {
    uint32_t layer;
    ggml_tensor* ids;  // the host's
    int64_t n_experts;
    int position;  // of its first expert operation
  };

  // Whether the ids of these layers, in the graph's order, can be waited for together.
  static bool is_possible(std::span<const Layer> layers);

  // REQUIRES: is_possible.
  void place(const ggml_cgraph& graph, std::span<const Layer> layers, const Memory& memory,
             SlotsNodePool& pool);
  bool is_placed(const Memory& memory) const {
    return !nodes_.empty() && memory.buffer == memory_.buffer && memory.generation == memory_.generation;
  }
  // Forgets a graph that has changed.
  void clear() { nodes_.clear(); }

  // In place of the ids of layers[index].
  ggml_tensor* slots(std::size_t index) const { return &placed_[index]->ids; }
  ggml_cgraph graph(const ggml_cgraph& host);
  std::span<const PlannedFetch> waits() const { return waits_; }

 private:
  Memory memory_;
  std::vector<std::shared_ptr<SlotsNode>> placed_;
  std::vector<ggml_tensor*> nodes_;
  std::vector<PlannedFetch> waits_;  // by `fetched`
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_SPILL_WAIT_PLAN_H_
