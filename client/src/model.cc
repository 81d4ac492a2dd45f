#include "client/src/model.h"

#include <utility>

#include "client/src/error.h"
#include "client/src/shared_words.h"

namespace moecached::client {

// The public header includes nothing of proto/, so it says the numbers again.
static_assert(static_cast<int>(MOECACHED_KIND_GATE) == MOECACHED_PART_GATE);
static_assert(static_cast<int>(MOECACHED_KIND_UP) == MOECACHED_PART_UP);
static_assert(static_cast<int>(MOECACHED_KIND_DOWN) == MOECACHED_PART_DOWN);
static_assert(static_cast<int>(MOECACHED_KIND_GATE_UP) == MOECACHED_PART_GATE_UP);
static_assert(static_cast<int>(MOECACHED_KIND_GATE_BIAS) == MOECACHED_PART_GATE_BIAS);
static_assert(static_cast<int>(MOECACHED_KIND_UP_BIAS) == MOECACHED_PART_UP_BIAS);
static_assert(static_cast<int>(MOECACHED_KIND_DOWN_BIAS) == MOECACHED_PART_DOWN_BIAS);
static_assert(static_cast<int>(MOECACHED_KIND_GATE_UP_BIAS) == MOECACHED_PART_GATE_UP_BIAS);

moecached_status ModelMapping::open(Connection& connection, const ModelFiles& files, const GpuUuid* gpu,
                                    std::unique_ptr<ModelMapping>* out) {
  std::vector<UniqueFd> for_daemon;
  if (const auto status = files.reopen(&for_daemon)) return status;
  const std::string name = files.name();
  Connection::OpenedModel opened;
  if (const auto status = gpu == nullptr
                              ? connection.open_model(name.c_str(), for_daemon, &opened)
                              : connection.open_spill_model(name.c_str(), *gpu, for_daemon, &opened)) {
    return status;
  }

  auto mapping = std::make_unique<ModelMapping>();
  mapping->model_id = opened.model_id;
  if (const auto status =
          map_segment(opened.model, opened.model_bytes, PROT_READ, "model segment", &mapping->segment)) {
    return status;
  }
  if (const auto status =
          map_segment(opened.stream, opened.stream_bytes, PROT_READ, "stream segment", &mapping->stream)) {
    return status;
  }
  if (const auto status = check_size(opened.pool, opened.pool_bytes, "pool segment")) return status;
  ModelSegmentFacts facts;
  facts.boot_epoch = connection.boot_epoch();
  facts.model_id = opened.model_id;
  facts.n_lanes = connection.n_lanes();
  facts.pool_bytes = opened.pool_bytes;
  facts.stream_bytes = opened.stream_bytes;
  facts.file_bytes = files.sizes();
  facts.spills = gpu != nullptr;
  if (const auto status = check_model_segment(mapping->segment, facts, &mapping->layout)) return status;
  if (const auto status = WindowSet::map(mapping->layout, opened.pool, &mapping->windows)) return status;
  for (const LayerLayout& layer : mapping->layout.layers) {
    mapping->views.push_back({layer.entries, layer.layer.n_experts, layer.layer.n_slots, layer.n_slots_open});
  }
  *out = std::move(mapping);
  return MOECACHED_OK;
}

void LaneCounters::add_to(moecached_counters* sum) const noexcept {
  sum->lookups += lookups.value();
  sum->hits += hits.value();
  sum->leases += leases.value();
  sum->streamed_experts += streamed_experts.value();
  sum->fallback_reads += fallback_reads.value();
  sum->fallback_bytes += fallback_bytes.value();
  sum->dropped_records += dropped_records.value();
}

Model::Model(ModelFiles opened, const GpuUuid* of_gpu, std::unique_ptr<ModelMapping> first)
    : files(std::move(opened)),
      gpu(of_gpu == nullptr ? std::nullopt : std::optional(*of_gpu)),
      mapping(std::move(first)) {
  for (const LayerLayout& layer : mapping->layout.layers) {
    auto& names = part_names_.emplace_back();
    for (const moecached_shm_part& part : layer.parts) names.emplace_back(part.name);
  }
}

moecached_status Model::layer_info(std::uint32_t layer, moecached_layer_info* out) const {
  if (layer >= mapping->layout.layers.size()) {
    return fail(MOECACHED_E_ARGUMENT, "the model has %zu MoE layers, there is none with index %u",
                mapping->layout.layers.size(), layer);
  }
  const moecached_shm_layer& facts = mapping->layout.layers[layer].layer;
  const WindowSet::Window& window = mapping->windows[layer];
  out->block = facts.block;
  out->n_experts = facts.n_experts;
  out->n_parts = facts.n_parts;
  out->n_slots = load_relaxed(mapping->layout.layers[layer].n_slots_open);
  out->n_window_slots = window.n_window_slots;
  out->slot_stride = facts.slot_stride;
  out->window = window.address;
  return MOECACHED_OK;
}

moecached_status Model::part_info(std::uint32_t layer, std::uint32_t part, moecached_part_info* out) const {
  if (layer >= part_names_.size() || part >= part_names_[layer].size()) {
    return fail(MOECACHED_E_ARGUMENT, "the model has no part %u in MoE layer %u", part, layer);
  }
  const moecached_shm_part& facts = mapping->layout.layers[layer].parts[part];
  out->name = part_names_[layer][part].c_str();
  out->kind = facts.kind;
  out->ggml_type = facts.ggml_type;
  out->ne0 = facts.ne0;
  out->ne1 = facts.ne1;
  out->expert_bytes = facts.expert_bytes;
  out->slot_offset = facts.slot_offset;
  out->file = facts.file;
  out->file_offset = facts.file_offset;
  return MOECACHED_OK;
}

moecached_status Model::find(std::string_view tensor, std::uint32_t* layer, std::uint32_t* part) const {
  for (std::uint32_t l = 0; l < part_names_.size(); ++l) {
    for (std::uint32_t p = 0; p < part_names_[l].size(); ++p) {
      if (part_names_[l][p] != tensor) continue;
      *layer = l;
      *part = p;
      return MOECACHED_OK;
    }
  }
  return fail(MOECACHED_E_ARGUMENT, "%.*s is not a tensor of experts that the daemon serves",
              static_cast<int>(tensor.size()), tensor.data());
}

}  // namespace moecached::client
