// Computes one expert operation whose batch needs more experts than the layer has slots.
//
// The (column, row) pairs of the batch are grouped by expert. Experts that are resident are computed from the
// window; the others come through the lane's stream buffer in waves, one half being read while the other is
// computed. A group of experts is one small MUL_MAT_ID over gathered activations, run by the host's own
// backend, its results scattered to where the stock operation would have put them. All pairs of an expert
// stay together: stock kernels choose their path by that count, so the bytes are equal to stock's. ADD_ID is
// added here: one float addition, as stock does it. Thread: one at a time, the lane's. Memory: scratch of one
// group, kept for the next.
#ifndef MOECACHED_SHIM_GGML_WAVES_H_
#define MOECACHED_SHIM_GGML_WAVES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "moecached/moecached.h"
#include "shim/ggml/model.h"

namespace moecached::shim {

// Computes one node with the host's backend.
class NodeComputer {
 public:
  virtual ~NodeComputer() = default;
  virtual ggml_status compute_node(ggml_tensor& node) = 0;
};

struct ExpertOp {
  ggml_tensor* node;       // MUL_MAT_ID or ADD_ID: gives activations and destination
  const ggml_tensor* ids;  // [columns, rows] expert ids
  const WindowTensor* weight;
  uint32_t n_experts;
};

class WaveRunner {
 public:
  // GGML_STATUS_SUCCESS, what compute_node returned, or GGML_STATUS_FAILED after a sentence.
  ggml_status run(moecached_lane* lane, const ExpertOp& op, NodeComputer& computer);
  // Stream reads since construction.
  uint64_t waves() const { return waves_; }

 private:
  struct Pair {
    int32_t column;
    int32_t row;
  };
  // An expert and its index in the weights at hand.
  struct Placed {
    int32_t expert;
    int32_t index;
  };

  bool group_pairs(const ExpertOp& op);
  std::span<const Pair> pairs_of(int32_t expert) const;
  ggml_status compute(const ExpertOp& op, ggml_tensor& weights, std::span<const Placed> experts,
                      NodeComputer& computer);
  ggml_status multiply(const ExpertOp& op, ggml_tensor& weights, std::span<const Placed> experts,
                       std::size_t n_pairs, NodeComputer& computer);
  void add_rows(const ExpertOp& op, const ggml_tensor& weights, const Placed& placed) const;
  ggml_status stream(moecached_lane* lane, const ExpertOp& op, NodeComputer& computer);

  uint64_t waves_ = 0;
  std::vector<uint32_t> first_pair_;  // by expert, one more at the end
  std::vector<Pair> pairs_;           // by expert
  std::vector<int32_t> experts_;      // that the batch uses, ascending
  std::vector<int32_t> slots_;
  std::vector<Placed> resident_;
  std::vector<int32_t> absent_;
  std::vector<Placed> wave_;
  std::vector<float> gathered_;
  std::vector<float> results_;
  std::vector<int32_t> indexes_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_WAVES_H_
