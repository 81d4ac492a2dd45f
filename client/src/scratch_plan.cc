#include "client/src/scratch_plan.h"

#include <algorithm>
#include <cstddef>

namespace moecached::client {
namespace {

// Kernels that take a row in steps of 512 elements read up to so many bytes past the last row of an expert.
constexpr std::uint64_t kReadPast = 4096;
// Device memory is what the daemon keeps experts in. Within kBytes as many tokens as fit; for one token up to
// kOneTokenBytes: large experts are read in place almost as fast.
constexpr std::uint64_t kBytes = std::uint64_t{96} << 20;
constexpr std::uint64_t kOneTokenBytes = std::uint64_t{256} << 20;

std::uint64_t rounded_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// For all layers, from `plan.first` and `plan.offset`.
std::vector<std::uint64_t> memory_for(const GpuLayout& layout, const ScratchPlan& plan,
                                      std::uint32_t n_slots) {
  std::vector<std::uint64_t> bytes(MOECACHED_MAX_PARTS, 0);
  for (std::uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    const LayerLayout& layer = layout.model.layers[l];
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      const std::uint64_t end =
          (std::uint64_t{plan.first[l]} + n_slots) * layer.parts[p].expert_bytes + kReadPast;
      bytes[p] =
          std::max(bytes[p], rounded_up(end - plan.offset[layout.part_index(l, p)], layout.gpu.granularity));
    }
  }
  return bytes;
}

std::uint64_t sum(const std::vector<std::uint64_t>& values) {
  std::uint64_t total = 0;
  for (const std::uint64_t value : values) total += value;
  return total;
}

}  // namespace

ScratchPlan plan_scratch(const GpuLayout& layout) {
  ScratchPlan plan;
  const std::uint64_t granularity = layout.gpu.granularity;
  plan.offset.resize(layout.windows.size());
  plan.window_bytes.resize(layout.windows.size());
  bool copies_in_words = true;
  for (std::uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    const LayerLayout& layer = layout.model.layers[l];
    std::uint64_t first = 0;
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      const moecached_shm_window& window = layout.windows[layout.part_index(l, p)];
      const std::uint64_t stride = layer.parts[p].expert_bytes;
      first = std::max(first, (window.device_bytes + window.host_bytes + stride - 1) / stride);
      copies_in_words = copies_in_words && stride % sizeof(std::uint32_t) == 0;
    }
    plan.first.push_back(static_cast<std::uint32_t>(first));
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      plan.offset[layout.part_index(l, p)] = first * layer.parts[p].expert_bytes / granularity * granularity;
    }
  }
  const std::uint32_t one_token = layout.model.model.n_expert_used;
  if (copies_in_words && one_token > 0 && one_token <= ScratchPlan::kSlotsMax) {
    for (std::uint32_t n = one_token; n <= ScratchPlan::kSlotsMax; n += one_token) {
      if (sum(memory_for(layout, plan, n)) <= (n == one_token ? kOneTokenBytes : kBytes)) plan.n_slots = n;
    }
  }
  plan.memory_bytes = memory_for(layout, plan, plan.n_slots);
  for (std::uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    for (std::uint32_t p = 0; p < layout.model.layers[l].parts.size(); ++p) {
      const std::uint32_t part = layout.part_index(l, p);
      const moecached_shm_window& window = layout.windows[part];
      plan.window_bytes[part] = plan.n_slots > 0 ? plan.offset[part] + plan.memory_bytes[p]
                                                 : window.device_bytes + window.host_bytes;
    }
  }
  return plan;
}

}  // namespace moecached::client
