// Graphs of one CUDA backend that use experts of models which spill (spill_model.h).
//
// An expert may be on disk, so something must wait at each MoE layer. A few tokens: the graph is launched
// whole, and waits on the GPU (spill_wait_plan.h) until a thread of the client has resolved what the router
// chose. Where that cannot be done, and in the first graphs, whose kernels stock still loads, the graph is
// cut:
//
//   launch what comes before the layer's first expert operation -> wait for the GPU -> read the router's ids
//   -> resolve: experts in VRAM stay where they are, others are copied to scratch slots, from RAM or from
//   disk -> swap the operations' weight and ids sources, launch on
//
// A batch that uses more experts than that (most prompts) has the layer's parts copied whole, to where the
// file has them, so that stock's kernels see stock's shape: operation by operation, so that one computes
// while the next one's part is read.
//
// Each piece is the host's nodes with the host's hash set and use counts: fusion is stock's, and stock
// captures a CUDA graph for each. Sources are swapped back at the end. Thread: one graph at a time, as for
// any ggml backend. Memory: a buffer for slots; one for the parts of a layer from the first prompt on.
#ifndef MOECACHED_SHIM_GGML_SPILL_RUNNER_H_
#define MOECACHED_SHIM_GGML_SPILL_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "moecached/moecached.h"
#include "shim/ggml/spill_model.h"
#include "shim/ggml/spill_wait_plan.h"
#include "shim/ggml/weight_buffer.h"

namespace moecached::shim {

class SpillRunner {
 public:
  // stock: the backend's functions before it was hooked; outlives this.
  SpillRunner(ggml_backend_t backend, const ggml_backend_i& stock) : backend_(backend), stock_(stock) {}
  // REQUIRES: the backend still lives.
  ~SpillRunner();
  SpillRunner(const SpillRunner&) = delete;
  SpillRunner& operator=(const SpillRunner&) = delete;

  // Whether the graph uses experts of models that spill.
  static bool is_for(const ggml_cgraph& graph);
  // REQUIRES: is_for.
  ggml_status compute(ggml_cgraph& graph);

 private:
  struct Buffer {
    ggml_backend_buffer_t memory = nullptr;
    std::size_t bytes = 0;
    char* address() const { return static_cast<char*>(memory->iface.get_base(memory)); }
  };
  using IdsKey = std::tuple<uint32_t, int64_t, int64_t>;  // layer, columns, rows
  struct Lane {
    std::shared_ptr<SpillExperts> experts;
    std::shared_ptr<SpillModel> model;
    moecached_spill_lane* lane = nullptr;
    ggml_backend_event_t ready = nullptr;
    Buffer slots;
    std::vector<Buffer> parts;  // by part of a layer
    // Tensors that stand in for the host's. They keep their addresses, since stock compares them: see
    // SlotsNodePool.
    std::map<const GpuTensor*, ggml_tensor> windows, wholes;
    std::map<IdsKey, ggml_tensor> ids;
    ggml_backend_buffer_t foreign = nullptr;
    Buffer waits;                   // SpillWaitPlan::Memory
    uint64_t waits_generation = 0;  // of the windows that slots there are of
    uint32_t small_graphs = 0;      // that could have waited on the GPU
    bool refuses_waits = false;     // for good
  };
  enum class Path : uint8_t { kNone, kSlots, kWhole };
  struct Operation {
    ggml_tensor* node;
    int weight_source;    // 0 or 1; ids are source 2
    ggml_tensor* weight;  // the host's
    ggml_tensor* ids;     // the host's
    const GpuTensor* tensor;
    int position;
  };
  struct Cut {  // one layer
    Lane* lane;
    uint32_t layer;
    ggml_tensor* ids;
    std::vector<Operation> operations;
    Path path = Path::kNone;  // of the last time
    uint64_t generation = 0;  // of the windows then
    bool changed = false;     // since the last time
    int position() const { return operations.front().position; }
  };
  struct Plan {
    ggml_cgraph graph = {};
    std::vector<Cut> cuts;
    uint64_t used = 0;
    bool may_wait = false;  // on the GPU, as far as the graph goes
    bool waited = false;    // the last time
    SpillWaitPlan waiting;
    std::vector<SpillWaitPlan::Layer> waiting_layers() const;
    uint32_t n_ids_max() const;  // of a layer
    uint32_t n_ids_of_token() const;
  };

  Plan* plan_of(const ggml_cgraph& graph);
  bool find(Plan& plan, const ggml_cgraph& graph);
  Lane* lane_of(const ServedTensor& served);
  void free_lane(Lane& lane);
  bool grow(Buffer& buffer, std::size_t bytes, const char* what);
  ggml_status run(Plan& plan);
  static bool is_wait_wanted();
  bool can_wait(const Plan& plan);
  static void write_identity(Lane& lane);
  bool prepare_waits(Lane& lane, const Plan& plan);
  ggml_status run_waiting(Plan& plan);
  ggml_status launch(const Plan& plan, int first, int last, bool changed);
  bool read_ids(const ggml_tensor& ids);
  bool place_slots(Cut& cut, bool* too_many);
  ggml_status run_whole(const Plan& plan, Cut& cut);
  bool load_whole(Cut& cut, Operation& operation);
  ggml_tensor& window(Cut& cut, const GpuTensor& tensor);
  static void note(Cut& cut, Path path);

  const ggml_backend_t backend_;
  const ggml_backend_i& stock_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Plan>> plans_;
  Plan unnamed_;  // graphs without a number
  uint64_t now_ = 0;
  SlotsNodePool pool_;
  std::vector<uint32_t> layers_;
  std::vector<char> ids_;  // as they lie on the GPU
  std::vector<int32_t> slots_, experts_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_SPILL_RUNNER_H_
