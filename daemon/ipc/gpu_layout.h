// Where the slots of a model on a GPU lie: the windows of proto/shm/layout.h. Pure. Thread: any.
//
//   window of a part:  | device slots 0 .. n_device_max-1 |pad| gap | host_first | ... one host slot per
//   expert |
//                      0                                  device_bytes            device_bytes + host_bytes
//
// One table serves all parts of a layer, so host_first is the largest that any part needs; parts with small
// experts have a gap of unused slots.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/model/model_layout.h"

namespace moecached {

struct GpuPartPlan {
  std::uint64_t device_bytes = 0;  // of addresses for device slots
  std::uint64_t host_bytes = 0;
};

struct GpuLayerPlan {
  std::uint32_t n_device_max = 0;  // device slots that the addresses have room for
  std::uint32_t host_first = 0;
  std::vector<GpuPartPlan> parts;
};

[[nodiscard]] GpuLayerPlan plan_gpu_layer(const LayerLayout& layer, std::uint32_t n_device_max,
                                          std::uint64_t granularity);

// Device memory behind the first n slots of one part.
[[nodiscard]] std::uint64_t gpu_part_bytes(const GpuPartPlan& plan, const PartLayout& part,
                                           std::uint32_t n_slots, std::uint64_t granularity);

// Slots of a share of each layer's experts, rounded down; at most all.
[[nodiscard]] std::vector<std::uint32_t> gpu_slots_at(const ModelLayout& layout, double share);
// The most that `spec` asks for, whatever memory there is.
[[nodiscard]] std::vector<std::uint32_t> gpu_slots_wanted(const ModelLayout& layout, const SlotsSpec& spec);
// As many of `wanted` as fit into `budget` bytes of device memory, the same share of each layer's experts;
// may be 0.
[[nodiscard]] std::vector<std::uint32_t> gpu_slots_that_fit(const ModelLayout& layout,
                                                            const std::vector<GpuLayerPlan>& plans,
                                                            const std::vector<std::uint32_t>& wanted,
                                                            std::uint64_t budget, std::uint64_t granularity);
[[nodiscard]] std::uint64_t gpu_device_bytes(const ModelLayout& layout,
                                             const std::vector<GpuLayerPlan>& plans,
                                             const std::vector<std::uint32_t>& n_slots,
                                             std::uint64_t granularity);

}  // namespace moecached
