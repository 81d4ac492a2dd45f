#include "daemon/ipc/gpu_layout.h"

#include <algorithm>
#include <cmath>

#include "daemon/base/check.h"

namespace moecached {
namespace {

// Kernels that take a row in steps of 512 elements read up to so many bytes past the last row of an expert.
constexpr std::uint64_t kReadPast = 4096;
// Device slots of a window in which several GPUs have sections: as many as cost prompts a few percent.
constexpr std::uint32_t kFewSlots = 512, kSlotsPerExpertMax = 4;

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

GpuLayerPlan plan_gpu_layer(const LayerLayout& layer, std::uint32_t n_device_max, GpuSections sections,
                            std::uint64_t granularity) {
  CHECK(sections.own < sections.n);
  GpuLayerPlan plan;
  plan.n_device_max = n_device_max;
  plan.own = sections.own;
  plan.parts.resize(layer.parts.size());
  std::uint32_t first = 0;
  for (std::uint32_t k = 0; k < sections.n; ++k) {
    plan.first.push_back(first);
    const std::uint64_t end_slot = std::uint64_t{first} + n_device_max;
    // Behind the last section there is memory to be read past its end; behind the others there may be none.
    const std::uint64_t past = k + 1 < sections.n && n_device_max > 0 ? kReadPast : 0;
    std::uint32_t next = 0;
    for (std::size_t p = 0; p < layer.parts.size(); ++p) {
      const std::uint64_t expert_bytes = layer.parts[p].expert_bytes;
      plan.parts[p].begin.push_back(first * expert_bytes / granularity * granularity);
      const std::uint64_t end = round_up(end_slot * expert_bytes + past, granularity);
      next = std::max(next, static_cast<std::uint32_t>((end + expert_bytes - 1) / expert_bytes));
    }
    first = next;
  }
  plan.host_first = first;
  for (std::size_t p = 0; p < layer.parts.size(); ++p) {
    GpuPartPlan& out = plan.parts[p];
    // The gap is addresses of the device part, not pinned memory: with biases of a few KiB it spans many
    // slots.
    out.device_bytes =
        std::uint64_t{plan.host_first} * layer.parts[p].expert_bytes / granularity * granularity;
    const std::uint64_t end =
        (std::uint64_t{plan.host_first} + layer.n_experts) * layer.parts[p].expert_bytes;
    out.host_bytes = round_up(end - out.device_bytes + kReadPast, granularity);
  }
  return plan;
}

std::uint32_t gpu_sections_that_fit(const ModelLayout& layout, const std::vector<std::uint32_t>& room,
                                    std::uint32_t n, std::uint64_t granularity) {
  const auto fits = [&](std::uint32_t sections) {
    for (std::size_t l = 0; l < layout.layers.size(); ++l) {
      const LayerLayout& layer = layout.layers[l];
      const GpuLayerPlan plan = plan_gpu_layer(layer, room[l], {.own = 0, .n = sections}, granularity);
      if (plan.host_first > std::max(kFewSlots, kSlotsPerExpertMax * layer.n_experts)) return false;
    }
    return true;
  };
  while (n > 1 && !fits(n)) --n;
  return n;
}

std::uint64_t gpu_part_bytes(const GpuLayerPlan& plan, std::size_t p, const PartLayout& part,
                             std::uint32_t n_slots, std::uint64_t granularity) {
  if (n_slots == 0) return 0;
  const GpuPartPlan& windows = plan.parts[p];
  const std::uint64_t begin = windows.begin[plan.own];
  const std::uint64_t end =
      plan.own + 1 < windows.begin.size() ? windows.begin[plan.own + 1] : windows.device_bytes;
  const std::uint64_t last = (std::uint64_t{plan.own_first()} + n_slots) * part.expert_bytes;
  // Cut at the end of the device part: what is read past its last slot is host memory, which is mapped from
  // there on.
  return std::min(end, round_up(last + kReadPast, granularity)) - begin;
}

std::vector<std::uint32_t> gpu_slots_at(const ModelLayout& layout, double share) {
  std::vector<std::uint32_t> n;
  for (const LayerLayout& layer : layout.layers) {
    n.push_back(static_cast<std::uint32_t>(std::floor(layer.n_experts * std::clamp(share, 0.0, 1.0) + 1e-9)));
  }
  return n;
}

std::vector<std::uint32_t> gpu_slots_wanted(const ModelLayout& layout, const SlotsSpec& spec) {
  switch (spec.kind) {
    case SlotsSpec::Kind::kAuto:
      return gpu_slots_at(layout, 1);
    case SlotsSpec::Kind::kPercent:
      return gpu_slots_at(layout, spec.value / 100);
    case SlotsSpec::Kind::kCount:
      break;
  }
  std::vector<std::uint32_t> n;
  for (const LayerLayout& layer : layout.layers)
    n.push_back(std::min(layer.n_experts, static_cast<std::uint32_t>(spec.value)));
  return n;
}

std::uint64_t gpu_device_bytes(const ModelLayout& layout, const std::vector<GpuLayerPlan>& plans,
                               const std::vector<std::uint32_t>& n_slots, std::uint64_t granularity) {
  std::uint64_t bytes = 0;
  for (std::size_t l = 0; l < layout.layers.size(); ++l) {
    for (std::size_t p = 0; p < layout.layers[l].parts.size(); ++p)
      bytes += gpu_part_bytes(plans[l], p, layout.layers[l].parts[p], n_slots[l], granularity);
  }
  return bytes;
}

std::vector<std::uint32_t> gpu_slots_that_fit(const ModelLayout& layout,
                                              const std::vector<GpuLayerPlan>& plans,
                                              const std::vector<std::uint32_t>& wanted, std::uint64_t budget,
                                              std::uint64_t granularity) {
  CHECK(wanted.size() == layout.layers.size());
  auto at = [&](double share) {
    std::vector<std::uint32_t> n = gpu_slots_at(layout, share);
    for (std::size_t l = 0; l < n.size(); ++l) n[l] = std::min(n[l], wanted[l]);
    return n;
  };
  if (gpu_device_bytes(layout, plans, wanted, granularity) <= budget) return wanted;
  // The steps are whole slots, so 40 halvings are more than exact.
  double low = 0, high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (gpu_device_bytes(layout, plans, at(middle), granularity) <= budget ? low : high) = middle;
  }
  return at(low);
}

}  // namespace moecached
