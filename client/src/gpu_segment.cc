#include "client/src/gpu_segment.h"

#include <algorithm>
#include <cstring>

#include "client/src/error.h"

namespace moecached::client {
namespace {

// Nothing that a daemon serves comes near; above it sums of a few sizes could overflow.
constexpr std::uint64_t kAddressSpace = std::uint64_t{1} << 47;
constexpr std::uint64_t kGpuOffset = sizeof(moecached_shm_header) + sizeof(moecached_shm_model);
constexpr std::uint32_t kChunksMax = 1u << 20;

bool power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

const char* bad_model(const moecached_shm_model& model, const GpuSegmentFacts& facts,
                      std::uint64_t segment_bytes) {
  if (model.model_id != facts.model_id) return "model id";
  if (model.n_layers < 1 || model.n_layers > MOECACHED_MAX_LAYERS) return "number of layers";
  if (model.n_parts > MOECACHED_MAX_LAYERS * MOECACHED_MAX_PARTS) return "number of parts";
  if (model.n_files != facts.file_bytes.size()) return "number of files";
  if (model.n_expert_used < 1 || model.n_expert_used > MOECACHED_MAX_EXPERTS) {
    return "number of experts per token";
  }
  if (std::memchr(model.name, '\0', sizeof model.name) == nullptr) return "name of the model";
  if (model.layers_offset % alignof(moecached_shm_layer) != 0) return "alignment of the arrays";
  if (!fits(model.layers_offset, model.n_layers, sizeof(moecached_shm_layer), segment_bytes) ||
      !parts_fit(model, segment_bytes)) {
    return "arrays do not lie within the segment";
  }
  return nullptr;
}

const char* bad_log(const moecached_shm_gpu& gpu, const moecached_shm_model& model,
                    const GpuSegmentFacts& facts) {
  if (!power_of_two(gpu.log_entries)) return "entries of the log";
  if (gpu.log_bytes_per_lane % 4096 != 0 ||
      !fits(0, facts.n_lanes, gpu.log_bytes_per_lane, facts.log_bytes)) {
    return "size of the log segment";
  }
  if (gpu.log_entry_bytes % sizeof(moecached_shm_log_entry) != 0 ||
      !fits(0, gpu.log_entries, gpu.log_entry_bytes, gpu.log_bytes_per_lane)) {
    return "size of an entry of the log";
  }
  const std::uint64_t row_bytes =
      std::uint64_t{MOECACHED_LOG_TOKENS} * model.n_expert_used * sizeof(std::int32_t);
  if (gpu.log_layer_bytes != row_bytes) return "a layer in an entry of the log";
  if (gpu.log_slots_offset % sizeof(std::int32_t) != 0 ||
      !fits(sizeof(moecached_shm_log_entry), model.n_layers, sizeof(std::uint16_t), gpu.log_slots_offset) ||
      !fits(gpu.log_slots_offset, model.n_layers, gpu.log_layer_bytes, gpu.log_entry_bytes)) {
    return "an entry of the log does not hold every layer";
  }
  return nullptr;
}

const char* bad_gpu(const moecached_shm_gpu& gpu, const moecached_shm_model& model,
                    const GpuSegmentFacts& facts, std::uint64_t segment_bytes) {
  if (!std::equal(facts.uuid.begin(), facts.uuid.end(), gpu.uuid)) return "another GPU";
  if (!power_of_two(gpu.granularity) || gpu.granularity < 4096 || gpu.granularity > kAddressSpace) {
    return "granularity";
  }
  if (gpu.table_bytes < 1 || gpu.table_bytes > kAddressSpace) return "size of the table";
  if (gpu.windows_offset % alignof(moecached_shm_window) != 0 ||
      !fits(gpu.windows_offset, model.n_parts, sizeof(moecached_shm_window), segment_bytes)) {
    return "windows do not lie within the segment";
  }
  if (gpu.n_chunks_max > kChunksMax || gpu.chunks_offset % alignof(moecached_shm_chunk) != 0 ||
      !fits(gpu.chunks_offset, gpu.n_chunks_max, sizeof(moecached_shm_chunk), segment_bytes)) {
    return "chunks do not lie within the segment";
  }
  return bad_log(gpu, model, facts);
}

const char* bad_layer(const moecached_shm_layer& layer, const moecached_shm_model& model,
                      const moecached_shm_gpu& gpu) {
  if (layer.n_experts < 1 || layer.n_experts > MOECACHED_MAX_EXPERTS) return "number of experts";
  if (layer.n_parts < 1 || layer.n_parts > MOECACHED_MAX_PARTS) return "number of parts";
  if (layer.n_slots > layer.n_experts) return "number of slots";
  if (!fits(layer.first_part, layer.n_parts, 1, model.n_parts)) return "parts of a layer";
  if (gpu.identity_first > gpu.table_bytes ||
      !fits(0, gpu.identity_first + layer.n_experts, sizeof(std::int32_t), gpu.table_bytes)) {
    return "identity table";
  }
  if (!fits(0, std::uint64_t{layer.table_first} + layer.n_experts, sizeof(std::int32_t), gpu.table_bytes)) {
    return "slot table";
  }
  // Slot ids are int32.
  if (layer.host_first > INT32_MAX - layer.n_experts) return "first slot in host memory";
  if (layer.device_first > layer.host_first || layer.n_slots > layer.host_first - layer.device_first)
    return "first slot in device memory";
  return nullptr;
}

const char* bad_part(const moecached_shm_part& part) {
  if (part.expert_bytes > kAddressSpace) return "size of a part";
  if (part.slot_offset != 0) return "a part within a record, on a GPU";
  return nullptr;
}

const char* bad_window(const moecached_shm_window& window, const moecached_shm_part& part,
                       const moecached_shm_layer& layer, const moecached_shm_gpu& gpu) {
  if (window.device_bytes > kAddressSpace || window.host_bytes > kAddressSpace ||
      window.device_bytes % gpu.granularity != 0 || window.host_bytes % gpu.granularity != 0 ||
      window.host_bytes == 0) {
    return "size of a window";
  }
  if (!fits(0, std::uint64_t{layer.device_first} + layer.n_slots, part.expert_bytes, window.device_bytes)) {
    return "device slots do not lie within their window";
  }
  std::uint64_t host_offset = 0;
  if (__builtin_mul_overflow(std::uint64_t{layer.host_first}, part.expert_bytes, &host_offset) ||
      host_offset < window.device_bytes) {
    return "host slots begin in the device's part of the window";
  }
  if (!fits(0, std::uint64_t{layer.host_first} + layer.n_experts, part.expert_bytes,
            window.device_bytes + window.host_bytes)) {
    return "host slots do not lie within their window";
  }
  return nullptr;
}

}  // namespace

moecached_status check_gpu_segment(const Mapping& segment, const GpuSegmentFacts& facts, GpuLayout* out,
                                   GpuSegmentWords* words) {
  if (const auto status = check_header(segment, MOECACHED_SEGMENT_GPU_MODEL, facts.boot_epoch)) return status;
  const std::uint64_t bytes = segment.bytes();
  if (bytes < kGpuOffset + sizeof(moecached_shm_gpu)) return layout_mismatch("model segment");
  moecached_shm_model& model = out->model.model;
  moecached_shm_gpu& gpu = out->gpu;
  std::memcpy(&model, segment.data() + sizeof(moecached_shm_header), sizeof model);
  std::memcpy(&gpu, segment.data() + kGpuOffset, sizeof gpu);
  if (const char* bad = bad_model(model, facts, bytes)) return layout_mismatch(bad);
  if (const char* bad = bad_gpu(gpu, model, facts, bytes)) return layout_mismatch(bad);

  out->windows.resize(model.n_parts);
  std::memcpy(out->windows.data(), segment.data() + gpu.windows_offset,
              model.n_parts * sizeof(moecached_shm_window));
  out->model.layers.resize(model.n_layers);
  // A part belongs to one layer: else one window would have two geometries. Counting is enough, since parts
  // of a layer are a range.
  std::vector<bool> owned(model.n_parts, false);
  for (std::uint32_t i = 0; i < model.n_layers; ++i) {
    LayerLayout& layout = out->model.layers[i];
    moecached_shm_layer& layer = layout.layer;
    std::memcpy(&layer, segment.data() + model.layers_offset + i * sizeof layer, sizeof layer);
    if (const char* bad = bad_layer(layer, model, gpu)) return layout_mismatch(bad);
    if (const char* bad = take_parts(segment, model, facts.file_bytes, &layout)) return layout_mismatch(bad);
    for (std::uint32_t p = 0; p < layer.n_parts; ++p) {
      const std::uint32_t index = layer.first_part + p;
      if (owned[index]) return layout_mismatch("a part of two layers");
      owned[index] = true;
      if (const char* bad = bad_part(layout.parts[p])) return layout_mismatch(bad);
      if (const char* bad = bad_window(out->windows[index], layout.parts[p], layer, gpu)) {
        return layout_mismatch(bad);
      }
    }
    out->model.n_experts_max = std::max(out->model.n_experts_max, layer.n_experts);
  }
  // Every window is mapped by its index, so one that no layer owns has not been checked.
  if (std::find(owned.begin(), owned.end(), false) != owned.end())
    return layout_mismatch("a part of no layer");

  words->gpu = reinterpret_cast<const moecached_shm_gpu*>(segment.data() + kGpuOffset);
  words->layers = reinterpret_cast<const moecached_shm_layer*>(segment.data() + model.layers_offset);
  words->chunks = reinterpret_cast<const moecached_shm_chunk*>(segment.data() + gpu.chunks_offset);
  return MOECACHED_OK;
}

moecached_status take_chunk(const GpuLayout& layout, const GpuSegmentWords& words, std::uint32_t index,
                            moecached_shm_chunk* out) {
  if (index >= layout.gpu.n_chunks_max) return layout_mismatch("number of chunks");
  std::memcpy(out, words.chunks + index, sizeof *out);
  if (out->part >= layout.windows.size()) return layout_mismatch("part of a chunk");
  const std::uint64_t granularity = layout.gpu.granularity;
  if (out->bytes == 0 || out->bytes % granularity != 0 || out->offset % granularity != 0 ||
      !fits(out->offset, 1, out->bytes, layout.windows[out->part].device_bytes)) {
    return layout_mismatch("a chunk does not lie within the device's part of its window");
  }
  return MOECACHED_OK;
}

}  // namespace moecached::client
