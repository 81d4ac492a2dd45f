#include "shim/ggml/waves.h"

#include <algorithm>
#include <cstring>

#include "shim/ggml/log.h"

namespace moecached::shim {
namespace {

// Bounds the scratch of a group: at 4096 columns of floats this is 8 MiB each way.
constexpr std::size_t kPairsPerGroup = 512;

const char* row_of(const ggml_tensor& tensor, int64_t column, int64_t row) {
  return static_cast<const char*>(tensor.data) + static_cast<std::size_t>(column) * tensor.nb[1] +
         static_cast<std::size_t>(row) * tensor.nb[2];
}

char* row_of(ggml_tensor& tensor, int64_t column, int64_t row) {
  return static_cast<char*>(tensor.data) + static_cast<std::size_t>(column) * tensor.nb[1] +
         static_cast<std::size_t>(row) * tensor.nb[2];
}

// A dense tensor of one row a pair: [elements, 1, pairs], or ids [1, pairs].
ggml_tensor dense(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void* data) {
  ggml_tensor tensor = {};
  tensor.type = type;
  tensor.ne[0] = ne0;
  tensor.ne[1] = ne1;
  tensor.ne[2] = ne2;
  tensor.ne[3] = 1;
  tensor.nb[0] = 4;  // F32 and I32
  for (int i = 1; i < GGML_MAX_DIMS; ++i)
    tensor.nb[i] = tensor.nb[i - 1] * static_cast<std::size_t>(tensor.ne[i - 1]);
  tensor.data = data;
  return tensor;
}

}  // namespace

std::span<const WaveRunner::Pair> WaveRunner::pairs_of(int32_t expert) const {
  const std::size_t at = static_cast<std::size_t>(expert);
  return std::span(pairs_).subspan(first_pair_[at], first_pair_[at + 1] - first_pair_[at]);
}

// A counting sort by expert. False when an id is out of range.
bool WaveRunner::group_pairs(const ExpertOp& op) {
  const ggml_tensor& ids = *op.ids;
  const auto id_at = [&](int64_t column, int64_t row) {
    int32_t id;
    std::memcpy(&id,
                static_cast<const char*>(ids.data) + static_cast<std::size_t>(column) * ids.nb[0] +
                    static_cast<std::size_t>(row) * ids.nb[1],
                sizeof id);
    return id;
  };
  first_pair_.assign(op.n_experts + 2, 0);
  for (int64_t row = 0; row < ids.ne[1]; ++row) {
    for (int64_t column = 0; column < ids.ne[0]; ++column) {
      const int32_t id = id_at(column, row);
      if (id < 0 || id >= static_cast<int32_t>(op.n_experts)) return false;
      ++first_pair_[static_cast<std::size_t>(id) + 2];
    }
  }
  experts_.clear();
  for (uint32_t expert = 0; expert < op.n_experts; ++expert) {
    if (first_pair_[expert + 2] > 0) experts_.push_back(static_cast<int32_t>(expert));
    first_pair_[expert + 2] += first_pair_[expert + 1];
  }
  pairs_.resize(static_cast<std::size_t>(ids.ne[0] * ids.ne[1]));
  // first_pair_[e + 1] is where the next pair of e goes; when all are placed it is where e + 1 begins.
  for (int64_t row = 0; row < ids.ne[1]; ++row) {
    for (int64_t column = 0; column < ids.ne[0]; ++column) {
      const std::size_t at = first_pair_[static_cast<std::size_t>(id_at(column, row)) + 1]++;
      pairs_[at] = {static_cast<int32_t>(column), static_cast<int32_t>(row)};
    }
  }
  return true;
}

void WaveRunner::add_rows(const ExpertOp& op, const ggml_tensor& weights, const Placed& placed) const {
  const auto* bias = reinterpret_cast<const float*>(static_cast<const char*>(weights.data) +
                                                    static_cast<std::size_t>(placed.index) * weights.nb[1]);
  const int64_t n = op.node->ne[0];
  for (const Pair& pair : pairs_of(placed.expert)) {
    const auto* from = reinterpret_cast<const float*>(row_of(*op.node->src[0], pair.column, pair.row));
    auto* to = reinterpret_cast<float*>(row_of(*op.node, pair.column, pair.row));
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] + bias[i];
  }
}

ggml_status WaveRunner::multiply(const ExpertOp& op, ggml_tensor& weights, std::span<const Placed> experts,
                                 std::size_t n_pairs, NodeComputer& computer) {
  const ggml_tensor& activations = *op.node->src[1];
  const auto n_in = static_cast<std::size_t>(activations.ne[0]);
  const auto n_out = static_cast<std::size_t>(op.node->ne[0]);
  gathered_.resize(std::max(gathered_.size(), n_pairs * n_in));
  results_.resize(std::max(results_.size(), n_pairs * n_out));
  indexes_.resize(std::max(indexes_.size(), n_pairs));
  std::size_t at = 0;
  for (const Placed& placed : experts) {
    for (const Pair& pair : pairs_of(placed.expert)) {
      // Gate and up see one activation row a token (ne[1] == 1), down one for each chosen expert.
      std::memcpy(&gathered_[at * n_in], row_of(activations, pair.column % activations.ne[1], pair.row),
                  n_in * sizeof(float));
      indexes_[at++] = placed.index;
    }
  }
  const auto pairs = static_cast<int64_t>(n_pairs);
  ggml_tensor input = dense(GGML_TYPE_F32, activations.ne[0], 1, pairs, gathered_.data());
  ggml_tensor ids = dense(GGML_TYPE_I32, 1, pairs, 1, indexes_.data());
  ggml_tensor product = dense(GGML_TYPE_F32, op.node->ne[0], 1, pairs, results_.data());
  product.op = GGML_OP_MUL_MAT_ID;
  product.flags = GGML_TENSOR_FLAG_COMPUTE;  // else ggml skips the node in silence
  std::memcpy(product.op_params, op.node->op_params, sizeof product.op_params);
  product.src[0] = &weights;
  product.src[1] = &input;
  product.src[2] = &ids;
  const ggml_status status = computer.compute_node(product);
  if (status != GGML_STATUS_SUCCESS) return status;
  at = 0;
  for (const Placed& placed : experts) {
    for (const Pair& pair : pairs_of(placed.expert)) {
      std::memcpy(row_of(*op.node, pair.column, pair.row), &results_[at++ * n_out], n_out * sizeof(float));
    }
  }
  return GGML_STATUS_SUCCESS;
}

ggml_status WaveRunner::compute(const ExpertOp& op, ggml_tensor& weights, std::span<const Placed> experts,
                                NodeComputer& computer) {
  if (op.weight->is_bias) {
    for (const Placed& placed : experts) add_rows(op, weights, placed);
    return GGML_STATUS_SUCCESS;
  }
  std::size_t begin = 0;
  std::size_t n_pairs = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    n_pairs += pairs_of(experts[i].expert).size();
    if (n_pairs < kPairsPerGroup && i + 1 < experts.size()) continue;
    const ggml_status status =
        multiply(op, weights, experts.subspan(begin, i + 1 - begin), n_pairs, computer);
    if (status != GGML_STATUS_SUCCESS) return status;
    begin = i + 1;
    n_pairs = 0;
  }
  return GGML_STATUS_SUCCESS;
}

ggml_status WaveRunner::stream(moecached_lane* lane, const ExpertOp& op, NodeComputer& computer) {
  const uint32_t layer = op.weight->layer;
  const uint32_t part = op.weight->part;
  const std::size_t capacity = moecached_stream_capacity(lane, layer, part);
  if (capacity == 0) {
    say("the stream buffer is smaller than one expert of %s", op.weight->info.name);
    return GGML_STATUS_FAILED;
  }
  const auto begin_wave = [&](std::size_t first, uint32_t half) {
    ++waves_;
    return moecached_stream_begin(lane, layer, part, &absent_[first],
                                  std::min(capacity, absent_.size() - first), half);
  };
  const auto failed = [&] {
    say("experts of %s cannot be read: %s", op.weight->info.name, moecached_last_error());
    return GGML_STATUS_FAILED;
  };

  // The first wave is read while the resident experts are computed.
  if (!absent_.empty() && begin_wave(0, 0) != MOECACHED_OK) return failed();
  ggml_tensor window = op.weight->window;
  ggml_status status = compute(op, window, resident_, computer);
  uint32_t half = 0;
  for (std::size_t first = 0; first < absent_.size(); first += capacity, half ^= 1) {
    const void* data = nullptr;
    // Waited for even after a failure: the buffer must not be written to behind the next graph's back.
    if (moecached_stream_wait(lane, half, &data) != MOECACHED_OK) return failed();
    if (status != GGML_STATUS_SUCCESS) return status;
    const std::size_t next = first + capacity;
    if (next < absent_.size() && begin_wave(next, half ^ 1) != MOECACHED_OK) return failed();
    wave_.clear();
    const std::size_t n = std::min(capacity, absent_.size() - first);
    for (std::size_t i = 0; i < n; ++i) wave_.push_back({absent_[first + i], static_cast<int32_t>(i)});
    ggml_tensor weights = op.weight->window;
    const int expert_dimension = op.weight->is_bias ? 1 : 2;
    weights.ne[expert_dimension] = static_cast<int64_t>(n);
    weights.nb[expert_dimension] = op.weight->info.expert_bytes;
    for (int i = expert_dimension + 1; i < GGML_MAX_DIMS; ++i) {
      weights.nb[i] = weights.nb[i - 1] * static_cast<std::size_t>(weights.ne[i - 1]);
    }
    weights.data = const_cast<void*>(data);  // kernels only read src[0]
    status = compute(op, weights, wave_, computer);
    if (status != GGML_STATUS_SUCCESS && next >= absent_.size()) return status;
  }
  return status;
}

ggml_status WaveRunner::run(moecached_lane* lane, const ExpertOp& op, NodeComputer& computer) {
  const ggml_tensor& input = *op.node->src[op.weight->is_bias ? 0 : 1];
  if (op.node->type != GGML_TYPE_F32 || input.type != GGML_TYPE_F32 || input.nb[0] != sizeof(float) ||
      op.node->nb[0] != sizeof(float)) {
    say("%s: activations of another type than F32 cannot be computed in waves", op.node->name);
    return GGML_STATUS_FAILED;
  }
  if (!group_pairs(op)) {
    say("%s: an expert id is out of range", op.node->name);
    return GGML_STATUS_FAILED;
  }
  slots_.resize(experts_.size());
  const moecached_status status = moecached_lane_resolve_resident(lane, op.weight->layer, experts_.data(),
                                                                  experts_.size(), slots_.data());
  if (status != MOECACHED_OK) {
    say("%s: %s", op.node->name, moecached_last_error());
    return GGML_STATUS_FAILED;
  }
  resident_.clear();
  absent_.clear();
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    if (slots_[i] >= 0) {
      resident_.push_back({experts_[i], slots_[i]});
    } else {
      absent_.push_back(experts_[i]);
    }
  }
  return stream(lane, op, computer);
}

}  // namespace moecached::shim
