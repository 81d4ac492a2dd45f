// Where scratch slots lie: places for experts in the client's own device memory, behind the host slots of a
// window, to which the fetch kernel copies what a graph reads from RAM.
//
//   window of a part:  | device slots | host slots |  gap  | scratch slots | room for longer ones |
//                      0                           ^ scratch first * stride, the same id in all parts of a
//                      layer
//
// Layers are computed one after the other, so one memory serves all of them: part p of every layer has the
// same one mapped there. Not the memory itself: see gpu_scratch.h. Pure. Thread: any.
#pragma once

#include <cstdint>
#include <vector>

#include "client/src/gpu_segment.h"

namespace moecached::client {

struct ScratchPlan {
  // Ids that one graph may fetch: a few tokens of a model with 8 experts a token.
  static constexpr std::uint32_t kSlotsMax = 64;

  std::uint32_t n_slots = 0;                // 0: experts too large for it to be worth the memory
  std::vector<std::uint32_t> first;         // slot id of the first scratch slot, for each layer
  std::vector<std::uint64_t> memory_bytes;  // of the memory for part p of every layer
  std::vector<std::uint64_t> offset;        // of that memory in the window, for each part of the model
  std::vector<std::uint64_t> window_bytes;  // of addresses, for each part: everything above
};

[[nodiscard]] ScratchPlan plan_scratch(const GpuLayout& layout);

}  // namespace moecached::client
