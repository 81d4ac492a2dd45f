// The segment of a model on a GPU (MOECACHED_SEGMENT_GPU_MODEL) as a checked copy, like segments.h does for
// models in RAM: after it, geometry is never read from shared memory again. The few words that the daemon
// goes on writing (load_state, n_chunks, shapes, shape, and chunks beyond n_chunks) stay where they
// are and are read through GpuSegmentWords; a chunk is checked when it is taken. No CUDA here. Thread: any.
// Memory: a GpuLayout owns its copies; the mapping stays with the caller.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/segments.h"

namespace moecached::client {

using GpuUuid = std::array<std::uint8_t, MOECACHED_UUID_BYTES>;

struct GpuLayout {
  ModelLayout model;  // LayerLayout::entries is null: the table is in device memory
  moecached_shm_gpu gpu{};
  std::vector<moecached_shm_window> windows;  // by index of the part, as chunks name it

  [[nodiscard]] std::uint32_t part_index(std::uint32_t layer, std::uint32_t part) const {
    return model.layers[layer].layer.first_part + part;
  }
};

// In the mapped segment, for atomic loads.
struct GpuSegmentWords {
  const moecached_shm_gpu* gpu = nullptr;
  const moecached_shm_layer* layers = nullptr;
  const moecached_shm_chunk* chunks = nullptr;
};

struct GpuSegmentFacts {
  std::uint64_t boot_epoch = 0;
  std::uint32_t model_id = 0;
  std::uint32_t n_lanes = 0;    // of the session
  std::uint64_t log_bytes = 0;  // of the mapped descriptor
  GpuUuid uuid{};               // of the GPU that was asked for
  std::vector<std::uint64_t> file_bytes;
};
[[nodiscard]] moecached_status check_gpu_segment(const Mapping& segment, const GpuSegmentFacts& facts,
                                                 GpuLayout* out, GpuSegmentWords* words);

// Copies chunk `index` and checks that it lies within the device part of its window.
[[nodiscard]] moecached_status take_chunk(const GpuLayout& layout, const GpuSegmentWords& words,
                                          std::uint32_t index, moecached_shm_chunk* out);

}  // namespace moecached::client
