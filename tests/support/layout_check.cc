#include "tests/support/layout_check.h"

#include <algorithm>

#include "daemon/model/ggml_types.h"

namespace moecached::test {
namespace {

__extension__ using Wide = unsigned __int128;  // no sum or product of the checks below wraps in it

struct Region {
  Wide begin;
  Wide end;
};

std::string unsound_part(const PartLayout& part, const LayerLayout& layer,
                         std::span<const std::uint64_t> file_bytes) {
  if (part.expert_bytes == 0) return "no bytes";
  if (!part.extents.empty() && part.extents.size() != layer.n_experts) return "number of extents";
  for (std::uint32_t e = 0; e < layer.n_experts; ++e) {
    const PartExtent extent = part.extent(e);
    if (extent.file >= file_bytes.size()) return "file index";
    if (Wide{extent.offset} + part.expert_bytes > file_bytes[extent.file]) return "past the file";
  }
  const GgmlType* type = find_ggml_type(part.ggml_type);
  if (type == nullptr || part.ne0 % type->block_elements != 0) return "type";
  if (Wide{part.ne0} / type->block_elements * type->block_bytes * part.ne1 != part.expert_bytes)
    return "size";
  if (part.name.size() >= sizeof(moecached_shm_part::name)) return "long name";
  return "";
}

std::string unsound_record(const LayerLayout& layer, std::uint64_t alignment) {
  std::vector<Region> regions;
  bool any_direct = false;
  for (const PartLayout& part : layer.parts) {
    Region region{part.slot_offset, Wide{part.slot_offset} + part.expert_bytes};
    if (part.direct != (alignment != 0 && part.expert_bytes % alignment == 0)) return "direct or not";
    if (part.direct) {
      any_direct = true;
      for (std::uint32_t e = 0; e < layer.n_experts; ++e) {
        const PartExtent extent = part.extent(e);
        if (extent.direct != (part.slot_offset % alignment == extent.offset % alignment)) return "phase";
      }
      region.begin = region.begin / alignment * alignment;
      region.end = (region.end + alignment - 1) / alignment * alignment;
    } else if (part.slot_offset % 64 != 0) {
      return "copied part not on a cache line";
    }
    if (region.end > layer.slot_stride) return "past the record";
    regions.push_back(region);
  }
  std::ranges::sort(regions, {}, &Region::begin);
  for (std::size_t i = 1; i < regions.size(); ++i) {
    if (regions[i - 1].end > regions[i].begin) return "parts overlap in the record";
  }
  if (layer.slot_stride % 64 != 0 || (any_direct && layer.slot_stride % alignment != 0)) return "stride";
  return "";
}

}  // namespace

std::string unsound(const ModelLayout& layout, std::span<const std::uint64_t> file_bytes,
                    std::uint32_t alignment) {
  if (layout.layers.empty() || layout.layers.size() > MOECACHED_MAX_LAYERS) return "layer count";
  if (layout.n_files != file_bytes.size()) return "file count";
  Wide total = 0;
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerLayout& layer = layout.layers[i];
    if (i > 0 && layout.layers[i - 1].block >= layer.block) return "block order";
    if (layer.n_experts == 0 || layer.n_experts > MOECACHED_MAX_EXPERTS) return "expert count";
    if (layer.parts.empty() || layer.parts.size() > MOECACHED_MAX_PARTS) return "part count";
    for (std::size_t p = 0; p < layer.parts.size(); ++p) {
      const PartLayout& part = layer.parts[p];
      if (p > 0 && layer.parts[p - 1].kind >= part.kind) return "part order";
      if (auto why = unsound_part(part, layer, file_bytes); !why.empty()) return why + " (" + part.name + ")";
      total += Wide{part.expert_bytes} * layer.n_experts;
    }
    if (auto why = unsound_record(layer, alignment); !why.empty())
      return why + " in block " + std::to_string(layer.block);
  }
  const auto most = std::ranges::max(layout.layers, {}, &LayerLayout::n_experts).n_experts;
  if (layout.n_expert_used == 0 || layout.n_expert_used > most) return "experts used";
  if (total != layout.expert_bytes_total) return "total";
  return "";
}

}  // namespace moecached::test
