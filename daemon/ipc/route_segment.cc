#include "daemon/ipc/route_segment.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace moecached {
namespace {

std::string text_of(const char* from, std::size_t bytes) { return {from, ::strnlen(from, bytes)}; }

}  // namespace

Result<RouteSegment> RouteSegment::map(int fd, std::uint64_t bytes) {
  auto mapping = Mapping::map(fd, bytes, ClientAccess::kReadOnly);
  if (!mapping) return std::move(mapping).error();
  return RouteSegment(*std::move(mapping));
}

RouteSegment::RouteSegment(Mapping mapping) : mapping_(std::move(mapping)) {
  const std::byte* const base = mapping_.bytes().data();
  model_ = reinterpret_cast<const moecached_shm_model*>(base + sizeof(moecached_shm_header));
  layers_ = reinterpret_cast<const moecached_shm_layer*>(base + model_->layers_offset);
  parts_ = reinterpret_cast<const moecached_shm_part*>(base + model_->parts_offset);
  table_ = reinterpret_cast<const std::int32_t*>(base + model_->table_offset);
}

std::uint32_t RouteSegment::n_experts_max() const {
  std::uint32_t n = 0;
  for (std::uint32_t l = 0; l < model_->n_layers; ++l) n = std::max(n, layers_[l].n_experts);
  return n;
}

RouteGeometry RouteSegment::describe(std::uint64_t boot_epoch) const {
  RouteGeometry geometry;
  geometry.model = model_->model_id;
  geometry.name = text_of(model_->name, sizeof model_->name);
  geometry.boot_epoch = boot_epoch;
  geometry.n_expert_used = model_->n_expert_used;
  for (std::uint32_t l = 0; l < model_->n_layers; ++l) {
    const moecached_shm_layer& from = layers_[l];
    RouteLayer& to = geometry.layers.emplace_back();
    to.block = from.block;
    to.n_experts = from.n_experts;
    to.n_slots = from.n_slots;
    to.window_offset = from.window_offset;
    to.slot_stride = from.slot_stride;
    for (std::uint32_t p = from.first_part; p < from.first_part + from.n_parts; ++p) {
      to.parts.push_back({.name = text_of(parts_[p].name, sizeof parts_[p].name),
                          .ggml_type = parts_[p].ggml_type,
                          .ne0 = parts_[p].ne0,
                          .ne1 = parts_[p].ne1,
                          .expert_bytes = parts_[p].expert_bytes,
                          .slot_offset = parts_[p].slot_offset,
                          .file = parts_[p].file,
                          .file_offset = parts_[p].file_offset});
    }
  }
  return geometry;
}

}  // namespace moecached
