// Where the slots of a model on a GPU lie: the windows of proto/shm/layout.h. Pure. Thread: any.
//
//   | section 0 |pad| gap | section 1 |pad| gap | ... | host_first: one host slot per expert |
//   0                     begin[1]                    device_bytes                           + host_bytes
//
// A section is the room for the device slots of one GPU. GPUs that may read each other's slots have one each,
// at the same place in the windows of all of them: a slot has one number, and a peer's memory can be mapped
// where it belongs. One table serves all parts of a layer, so a section, and host_first, begins at the
// largest slot that any part needs; parts with small experts have a gap of unused slots.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/model/model_layout.h"

namespace moecached {

// Which of the sections belongs to the GPU whose windows these are.
struct GpuSections {
  std::uint32_t own = 0, n = 1;
};

struct GpuPartPlan {
  std::uint64_t device_bytes = 0;  // of addresses for device slots
  std::uint64_t host_bytes = 0;
  std::vector<std::uint64_t> begin;  // of each section, bytes; a multiple of the granularity
};

struct GpuLayerPlan {
  std::uint32_t n_device_max = 0;  // device slots that each section has room for
  std::uint32_t host_first = 0;
  std::uint32_t own = 0;             // section
  std::vector<std::uint32_t> first;  // slot of each section
  std::vector<GpuPartPlan> parts;
  [[nodiscard]] std::uint32_t own_first() const { return first[own]; }
};

[[nodiscard]] GpuLayerPlan plan_gpu_layer(const LayerLayout& layer, std::uint32_t n_device_max,
                                          GpuSections sections, std::uint64_t granularity);
// How many GPUs of n may have sections in one window: prompt kernels launch work per slot of a window, empty
// ones too. room: device slots by layer.
[[nodiscard]] std::uint32_t gpu_sections_that_fit(const ModelLayout& layout,
                                                  const std::vector<std::uint32_t>& room, std::uint32_t n,
                                                  std::uint64_t granularity);

// Device memory behind the first n slots of the own section of part p.
[[nodiscard]] std::uint64_t gpu_part_bytes(const GpuLayerPlan& plan, std::size_t p, const PartLayout& part,
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
