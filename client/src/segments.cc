#include "client/src/segments.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "client/src/error.h"
#include "proto/shm/stream_place.h"

namespace moecached::client {
moecached_status layout_mismatch(const char* what) {
  return fail(
      MOECACHED_E_VERSION,
      "the daemon's memory is not laid out as this client expects (%s): daemon and client are of different "
      "versions; upgrade the older one",
      what);
}

bool fits(std::uint64_t offset, std::uint64_t count, std::uint64_t size, std::uint64_t bytes) noexcept {
  std::uint64_t length = 0;
  std::uint64_t end = 0;
  return !__builtin_mul_overflow(count, size, &length) && !__builtin_add_overflow(offset, length, &end) &&
         end <= bytes;
}

moecached_status check_header(const Mapping& segment, moecached_segment_kind kind, std::uint64_t boot_epoch) {
  moecached_shm_header header{};
  if (segment.bytes() < sizeof header) return layout_mismatch("a segment is too small");
  std::memcpy(&header, segment.data(), sizeof header);
  if (header.magic != MOECACHED_SHM_MAGIC) return layout_mismatch("a segment has no moecached header");
  if (header.version != MOECACHED_SHM_VERSION) {
    return fail(
        MOECACHED_E_VERSION,
        "the daemon shares memory in version %u of its layout, this client knows version %u: upgrade the "
        "older one",
        header.version, unsigned{MOECACHED_SHM_VERSION});
  }
  if (header.kind != static_cast<std::uint32_t>(kind)) return layout_mismatch("a segment is of another kind");
  if (header.bytes < sizeof header || header.bytes > segment.bytes())
    return layout_mismatch("size of a segment");
  if (header.boot_epoch != boot_epoch) return layout_mismatch("a segment is of another daemon start");
  return MOECACHED_OK;
}

namespace {

const char* bad_part(const moecached_shm_part& part, const moecached_shm_layer& layer,
                     const moecached_shm_model& model) {
  if (!fits(part.slot_offset, 1, part.expert_bytes, layer.slot_stride))
    return "a part does not lie within its slot";
  // An expert may begin anywhere in a page.
  const std::uint64_t half_bytes = model.stream_bytes_per_lane / 2;
  if (!fits(MOECACHED_STREAM_PAGE - 1, 1, part.expert_bytes, half_bytes))
    return "half of the stream buffer is too small";
  return nullptr;
}

const char* bad_layer(const moecached_shm_layer& layer, const moecached_shm_model& model,
                      std::uint64_t segment_bytes) {
  const std::uint64_t page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (layer.n_experts < 1 || layer.n_experts > MOECACHED_MAX_EXPERTS) return "number of experts";
  if (layer.n_parts < 1 || layer.n_parts > MOECACHED_MAX_PARTS) return "number of parts";
  if (layer.n_slots < 1 || layer.n_slots > layer.n_experts) return "number of slots";
  if (layer.n_slots_open < 1 || layer.n_slots_open > layer.n_slots) return "number of open slots";
  if (!fits(layer.first_part, layer.n_parts, 1, model.n_parts)) return "parts of a layer";
  if (!fits(model.table_offset, std::uint64_t{layer.table_first} + layer.n_experts, sizeof(std::int32_t),
            segment_bytes)) {
    return "slot table";
  }
  if (layer.window_offset % page_bytes != 0 || layer.window_bytes % page_bytes != 0) {
    return "a window is not aligned to this machine's pages";
  }
  if (layer.slot_stride == 0 || !fits(0, layer.n_slots, layer.slot_stride, layer.window_bytes)) {
    return "slots do not lie within their window";
  }
  if (!fits(layer.window_offset, 1, layer.window_bytes, model.pool_bytes)) {
    return "a window does not lie within the pool";
  }
  return nullptr;
}

const char* bad_model(const moecached_shm_model& model, const ModelSegmentFacts& facts,
                      std::uint64_t segment_bytes) {
  if (model.model_id != facts.model_id) return "model id";
  if (model.n_layers < 1 || model.n_layers > MOECACHED_MAX_LAYERS) return "number of layers";
  if (model.n_parts > MOECACHED_MAX_LAYERS * MOECACHED_MAX_PARTS) return "number of parts";
  if (model.n_files != facts.file_bytes.size()) return "number of files";
  if (model.n_expert_used > MOECACHED_MAX_EXPERTS) return "number of experts per token";
  if (std::memchr(model.name, '\0', sizeof model.name) == nullptr) return "name of the model";
  if (model.layers_offset % alignof(moecached_shm_layer) != 0 ||
      model.table_offset % alignof(std::int32_t) != 0) {
    return "alignment of the arrays";
  }
  if (!fits(model.layers_offset, model.n_layers, sizeof(moecached_shm_layer), segment_bytes) ||
      !parts_fit(model, segment_bytes)) {
    return "arrays do not lie within the segment";
  }
  if (model.pool_bytes > facts.pool_bytes) return "size of the pool";
  if (model.stream_bytes_per_lane % 8192 != 0 ||
      !fits(0, facts.n_lanes, model.stream_bytes_per_lane, facts.stream_bytes)) {
    return "size of the stream segment";
  }
  return nullptr;
}

// What follows the model's facts in the segment of a spill model. Null, or what is odd.
const char* take_spill(const Mapping& segment, SpillWords* out) {
  const std::uint64_t at = sizeof(moecached_shm_header) + sizeof(moecached_shm_model);
  if (!fits(at, 1, sizeof(moecached_shm_spill), segment.bytes())) return "spill model segment";
  out->spill = reinterpret_cast<const moecached_shm_spill*>(segment.data() + at);
  out->n_arrays = out->spill->n_arrays;
  const std::uint64_t arrays = out->spill->arrays_offset;
  if (arrays % alignof(moecached_shm_array) != 0 ||
      !fits(arrays, out->n_arrays, sizeof(moecached_shm_array), segment.bytes())) {
    return "arrays of device slots";
  }
  out->arrays = reinterpret_cast<const moecached_shm_array*>(segment.data() + arrays);
  return nullptr;
}

const char* bad_arrays(const LayerLayout& layout, const SpillWords& spill) {
  if (!fits(layout.layer.first_array, layout.layer.n_parts, 1, spill.n_arrays)) return "arrays of a layer";
  if (layout.layer.class_index >= MOECACHED_MAX_LAYERS) return "layers of a slot class";
  for (std::uint32_t p = 0; p < layout.layer.n_parts; ++p) {
    if (spill.arrays[layout.layer.first_array + p].expert_bytes != layout.parts[p].expert_bytes)
      return "experts of an array";
  }
  return nullptr;
}

// They follow the parts. REQUIRES: those lie within a segment.
std::uint64_t extents_offset(const moecached_shm_model& model) {
  return model.parts_offset + model.n_parts * sizeof(moecached_shm_part);
}

}  // namespace

moecached_status check_size(const UniqueFd& fd, std::uint64_t bytes, const char* what) {
  struct stat facts {};
  if (::fstat(fd.get(), &facts) != 0) {
    return fail(MOECACHED_E_SYSTEM, "cannot look at the %s: %s", what, error_name(errno));
  }
  if (bytes == 0 || facts.st_size < 0 || static_cast<std::uint64_t>(facts.st_size) < bytes) {
    return fail(
        MOECACHED_E_VERSION,
        "the daemon announced a %s of %llu bytes and sent one of %lld: daemon and client are of different "
        "versions; upgrade the older one",
        what, static_cast<unsigned long long>(bytes), static_cast<long long>(facts.st_size));
  }
  return MOECACHED_OK;
}

moecached_status map_segment(const UniqueFd& fd, std::uint64_t bytes, int protection, const char* what,
                             Mapping* out) {
  if (const auto status = check_size(fd, bytes, what)) return status;
  *out = Mapping(::mmap(nullptr, bytes, protection, MAP_SHARED, fd.get(), 0), bytes);
  if (!out->valid()) {
    return fail(MOECACHED_E_SYSTEM, "cannot map %llu bytes of the %s: %s",
                static_cast<unsigned long long>(bytes), what, error_name(errno));
  }
  return MOECACHED_OK;
}

bool parts_fit(const moecached_shm_model& model, std::uint64_t segment_bytes) {
  return model.parts_offset % alignof(moecached_shm_part) == 0 &&
         fits(model.parts_offset, model.n_parts, sizeof(moecached_shm_part), segment_bytes) &&
         fits(extents_offset(model), model.n_extents, sizeof(moecached_shm_extent), segment_bytes);
}

const char* take_parts(const Mapping& segment, const moecached_shm_model& model,
                       const std::vector<std::uint64_t>& file_bytes, LayerLayout* out) {
  const moecached_shm_layer& layer = out->layer;
  const std::byte* const parts = segment.data() + model.parts_offset;
  out->parts.resize(layer.n_parts);
  out->extents.resize(layer.n_parts);
  std::memcpy(out->parts.data(), parts + layer.first_part * sizeof(moecached_shm_part),
              layer.n_parts * sizeof(moecached_shm_part));
  for (std::uint32_t p = 0; p < layer.n_parts; ++p) {
    const moecached_shm_part& part = out->parts[p];
    if (std::memchr(part.name, '\0', sizeof part.name) == nullptr) return "name of a part";
    if (part.expert_bytes == 0) return "size of a part";
    const auto lies_in_file = [&](std::uint32_t file, std::uint64_t offset, std::uint32_t n_experts) {
      return file < file_bytes.size() && fits(offset, n_experts, part.expert_bytes, file_bytes[file]);
    };
    if (part.first_extent == 0) {
      if (!lies_in_file(part.file, part.file_offset, layer.n_experts))
        return "a part does not lie within its file";
      continue;
    }
    const std::uint64_t first = part.first_extent - 1;
    if (!fits(first, layer.n_experts, 1, model.n_extents)) return "extents of a part";
    Extents& extents = out->extents[p];
    extents.resize(layer.n_experts);
    std::memcpy(extents.data(), segment.data() + extents_offset(model) + first * sizeof(moecached_shm_extent),
                extents.size() * sizeof(moecached_shm_extent));
    for (const moecached_shm_extent& extent : extents) {
      if (!lies_in_file(extent.file, extent.offset, 1)) return "an expert does not lie within its file";
    }
  }
  return nullptr;
}

moecached_shm_extent LayerLayout::place(std::uint32_t part, std::uint32_t expert) const {
  if (!extents[part].empty()) return extents[part][expert];
  return {parts[part].file, 0, parts[part].file_offset + expert * parts[part].expert_bytes};
}

moecached_status check_session_segment(const Mapping& segment, const moecached_handle_welcome& welcome,
                                       SessionLayout* out) {
  if (const auto status = check_header(segment, MOECACHED_SEGMENT_SESSION, welcome.boot_epoch)) return status;
  if (segment.bytes() < sizeof(moecached_shm_header) + sizeof(moecached_shm_session))
    return layout_mismatch("session segment");
  moecached_shm_session session{};
  std::memcpy(&session, segment.data() + sizeof(moecached_shm_header), sizeof session);
  if (session.session_id != welcome.session_id) return layout_mismatch("session id");
  if (session.n_lanes < 1 || session.n_lanes > MOECACHED_MAX_LANES) return layout_mismatch("number of lanes");
  if (session.ring_records != MOECACHED_RING_RECORDS) return layout_mismatch("records in a ring");
  if (session.lane_stride != sizeof(moecached_shm_lane)) return layout_mismatch("size of a lane");
  if (session.lanes_offset % sizeof(moecached_shm_record) != 0 ||
      !fits(session.lanes_offset, session.n_lanes, session.lane_stride, segment.bytes())) {
    return layout_mismatch("lanes do not lie within the segment");
  }
  out->lanes = reinterpret_cast<moecached_shm_lane*>(segment.data() + session.lanes_offset);
  out->n_lanes = session.n_lanes;
  return MOECACHED_OK;
}

moecached_status check_model_segment(const Mapping& segment, const ModelSegmentFacts& facts,
                                     ModelLayout* out) {
  const auto kind = facts.spills ? MOECACHED_SEGMENT_SPILL_MODEL : MOECACHED_SEGMENT_MODEL;
  if (const auto status = check_header(segment, kind, facts.boot_epoch)) return status;
  if (segment.bytes() < sizeof(moecached_shm_header) + sizeof(moecached_shm_model))
    return layout_mismatch("model segment");
  std::memcpy(&out->model, segment.data() + sizeof(moecached_shm_header), sizeof out->model);
  const moecached_shm_model& model = out->model;
  if (const char* bad = bad_model(model, facts, segment.bytes())) return layout_mismatch(bad);
  if (facts.spills) {
    if (const char* bad = take_spill(segment, &out->spill)) return layout_mismatch(bad);
  }

  out->layers.resize(model.n_layers);
  for (std::uint32_t i = 0; i < model.n_layers; ++i) {
    LayerLayout& layout = out->layers[i];
    moecached_shm_layer& layer = layout.layer;
    const std::byte* const at = segment.data() + model.layers_offset + i * sizeof layer;
    std::memcpy(&layer, at, sizeof layer);
    if (const char* bad = bad_layer(layer, model, segment.bytes())) return layout_mismatch(bad);
    if (const char* bad = take_parts(segment, model, facts.file_bytes, &layout)) return layout_mismatch(bad);
    for (const moecached_shm_part& part : layout.parts) {
      if (const char* bad = bad_part(part, layer, model)) return layout_mismatch(bad);
    }
    if (facts.spills) {
      if (const char* bad = bad_arrays(layout, out->spill)) return layout_mismatch(bad);
    }
    layout.entries =
        reinterpret_cast<const std::int32_t*>(segment.data() + model.table_offset) + layer.table_first;
    layout.n_slots_open =
        reinterpret_cast<const std::uint32_t*>(at + offsetof(moecached_shm_layer, n_slots_open));
    out->n_experts_max = std::max(out->n_experts_max, layer.n_experts);
  }
  return MOECACHED_OK;
}

moecached_status ModelLayout::locate(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                                     std::uint32_t* file, std::uint64_t* offset) const {
  if (layer >= layers.size() || part >= layers[layer].parts.size() ||
      expert >= layers[layer].layer.n_experts) {
    return fail(MOECACHED_E_ARGUMENT, "the model has no expert %u with a part %u in MoE layer %u", expert,
                part, layer);
  }
  const moecached_shm_extent place = layers[layer].place(part, expert);
  *file = place.file;
  *offset = place.offset;
  return MOECACHED_OK;
}

bool ModelLayout::same_experts(const ModelLayout& other) const {
  const auto same_part = [](const moecached_shm_part& a, const moecached_shm_part& b) {
    return a.kind == b.kind && a.ggml_type == b.ggml_type && a.file == b.file && a.ne0 == b.ne0 &&
           a.ne1 == b.ne1 && a.file_offset == b.file_offset && a.expert_bytes == b.expert_bytes &&
           std::strcmp(a.name, b.name) == 0;
  };
  const auto same_extent = [](const moecached_shm_extent& a, const moecached_shm_extent& b) {
    return a.file == b.file && a.offset == b.offset;
  };
  const auto same_extents = [&](const Extents& a, const Extents& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_extent);
  };
  const auto same_layer = [&](const LayerLayout& a, const LayerLayout& b) {
    return a.layer.block == b.layer.block && a.layer.n_experts == b.layer.n_experts &&
           std::equal(a.extents.begin(), a.extents.end(), b.extents.begin(), b.extents.end(), same_extents) &&
           std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(), same_part);
  };
  return std::equal(layers.begin(), layers.end(), other.layers.begin(), other.layers.end(), same_layer);
}

}  // namespace moecached::client
