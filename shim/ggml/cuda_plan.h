// A copy of a graph in which expert operations use slots of a GPU.
//
// For each layer one GET_ROWS on the slot table is put right before the first expert operation that uses the
// router's ids; behind the whole top-k chain, or stock's fusion of it is lost. The operations themselves are
// the host's nodes: their weight and ids sources are swapped while the graph is launched and put back
// afterwards.
//
//   host's nodes:  ... topk  MUL_MAT_ID(gate)  MUL_MAT_ID(up)  ...  MUL_MAT_ID(down) ...
//   plan's nodes:  ... topk  GET_ROWS  CONT  MUL_MAT_ID'  MUL_MAT_ID'  ...  MUL_MAT_ID' ...
//
// The CONT is there in batches of a few tokens, when the lane has scratch slots: a copy of the looked-up
// slots, in place of which cuda_fetch.h runs the kernel that fetches experts from RAM. A copy that is not
// replaced leaves the slots as they are: the experts are then read in place, and the result is the same.
//
// The graph keeps the host's hash set and use counts, in which the inserted nodes do not occur: a graph built
// anew would lose all fusion. Gate, up, down and biases of a layer share one ids tensor, since fused kernels
// compare pointers.
//
// A layer that is wholly resident has expert e in slot e: its operations keep the router's ids and get no
// GET_ROWS.
//
// The slots that a graph looked up stay in memory: they are what the client logs.
//
//   slots of a model:  row 0 | row 1 | ... | what the CONTs write
//                      a row: int32[tokens][columns] of one GET_ROWS, `pitch` bytes apart; those worth
//                      logging come first
//
// Pure: it calls neither ggml nor CUDA. Thread: the backend's. Memory: SlotsNodePool, see there.
#ifndef MOECACHED_SHIM_GGML_CUDA_PLAN_H_
#define MOECACHED_SHIM_GGML_CUDA_PLAN_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "ggml-impl.h"
#include "ggml.h"
#include "shim/ggml/gpu_model.h"

namespace moecached::shim {

// Batches that stock's matrix-vector kernels take, which do not care how many slots a tensor has, and read an
// expert anew for each of its tokens.
inline constexpr int64_t kVectorTokens = 8;

// Where an expert operation has its weights: 0 or 1, the ids are source 2; -1: it is none.
int weight_source_of(const ggml_tensor& node);

// The inserted tensors of one layer.
struct SlotsNode {
  ggml_tensor table = {};    // I32 {1, experts, tokens}, the same table for every token: nb[2] = 0
  ggml_tensor rows = {};     // the node: I32 {1, columns, tokens}
  ggml_tensor fetched = {};  // the CONT, of the same shape
  ggml_tensor ids = {};      // a view of the last of them, I32 {columns, tokens}
};

// What the tensors of a SlotsNode are made from.
struct SlotsKey {
  uint64_t table;  // 0: no GET_ROWS, the CONT takes the ids as they are, which are dense
  const void* table_buffer;
  uint64_t n_experts;
  const void* ids;
  const void* ids_data;
  int64_t columns;
  int64_t tokens;
  uint64_t slots;
  const void* slots_buffer;
  uint64_t fetched;     // 0: no CONT
  uint64_t generation;  // of the windows that are fetched into: what is captured names them
  auto operator<=>(const SlotsKey&) const = default;
};

// Keeps inserted tensors at their addresses over plans. Why: stock recaptures a CUDA graph when a node's
// bytes changed, its source pointers included, and a host that builds its graph anew for each batch puts the
// same tensors at the same addresses.
class SlotsNodePool {
 public:
  std::shared_ptr<SlotsNode> get(const SlotsKey& key, uint32_t layer, const ggml_tensor& ids);
  std::size_t size() const { return nodes_.size(); }

 private:
  static constexpr std::size_t kMax = 4096;  // then those that no plan uses are dropped; about 1 KiB each
  std::map<SlotsKey, std::shared_ptr<SlotsNode>> nodes_;
};

// Device memory for the slots of one model.
struct SlotsMemory {
  uint64_t address = 0;
  std::size_t bytes = 0;
  ggml_backend_buffer_t buffer = nullptr;
  uint32_t n_scratch = 0;   // ids that the lane can fetch at once
  uint64_t generation = 0;  // of the scratch slots; 0 without any
};

// One CONT, as what is enqueued in its place needs it.
struct PlannedFetch {
  uint64_t fetched = 0;  // where it writes
  uint64_t slots = 0;    // what it reads
  uint32_t n_ids = 0;
  uint32_t layer = 0;  // with MOECACHED_GPU_BY_EXPERT
  std::size_t share = 0;
};

class CudaPlan {
 public:
  // nullptr: no tensor of ours.
  using WindowOf = std::function<const GpuWindow*(const ggml_tensor& weight)>;

  // What a plan uses of one model.
  struct Share {
    const GpuModel* model = nullptr;
    std::size_t n_rows = 0;
    std::size_t pitch_bytes = 0;
    std::size_t n_fetchable = 0;  // of the rows: those of few tokens
    std::size_t slots_bytes() const { return (n_rows + n_fetchable) * pitch_bytes; }
    std::vector<uint16_t>
        layers;             // of the rows worth logging: those with n_expert_used columns and the most tokens
    uint32_t n_tokens = 0;  // in each of these
    std::vector<uint16_t> whole_layers;  // wholly resident: their operations keep the router's ids
    uint32_t n_whole_tokens = 0;         // the most in any of these
  };

  // First half: finds the expert operations. The windows must live as long as the plan.
  void find(const ggml_cgraph& graph, const WindowOf& window_of);
  // True while the graph is the one that was looked through.
  bool is_for(const ggml_cgraph& graph) const;
  uint64_t uid() const { return graph_.uid; }
  bool empty() const { return operations_.empty(); }
  const std::vector<Share>& shares() const { return shares_; }

  // Second half: makes the nodes. memory[i] is for shares()[i] and holds at least slots_bytes().
  void place(std::span<const SlotsMemory> memory, SlotsNodePool& pool);
  // True when place() was last called with this memory.
  bool is_placed(std::span<const SlotsMemory> memory) const;

  void swap();
  void restore();
  // The host's graph with the plan's nodes. REQUIRES: is_for(host) and placed. Valid until the next find().
  ggml_cgraph graph(const ggml_cgraph& host);
  const std::vector<ggml_tensor*>& nodes() const { return nodes_; }
  // In the order of `fetched`.
  std::span<const PlannedFetch> fetches() const { return fetches_; }

 private:
  struct Row {
    const GpuWindow* window;  // of its first operation
    const ggml_tensor* ids;   // the host's expert ids
    std::size_t share;
    std::size_t position;  // in the host's nodes, of its first operation
    std::size_t index;     // in the slots of the share
    bool fetchable;
    std::size_t fetched_index;  // the same for what is fetched
    bool fetches;
    std::shared_ptr<SlotsNode> node;
  };
  struct Operation {
    ggml_tensor* node;
    int weight_source;    // 0 or 1; ids are source 2
    ggml_tensor* weight;  // the host's
    ggml_tensor* ids;     // the host's
    const GpuWindow* window;
    std::size_t row;  // kNoRow: the ids stay
  };
  static constexpr std::size_t kNoRow = SIZE_MAX;

  std::size_t row_of(const GpuWindow& window, const ggml_tensor& ids, std::size_t position);
  std::size_t share_of(const GpuModel* model);
  void note_whole(const GpuWindow& window, const ggml_tensor& ids);
  void order_rows();

  ggml_cgraph graph_ = {};
  std::vector<Operation> operations_;
  std::vector<Row> rows_;
  std::vector<Share> shares_;
  std::vector<SlotsMemory> placed_;  // by share
  std::vector<ggml_tensor*> nodes_;
  std::vector<PlannedFetch> fetches_;
  bool is_new_ = true;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CUDA_PLAN_H_
