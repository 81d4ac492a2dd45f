#include "client/src/gpu_model.h"

#include <algorithm>
#include <utility>

#include "client/src/error.h"
#include "client/src/shared_words.h"

namespace moecached::client {

moecached_status GpuModel::open(Session& session, Connection& connection, std::span<const char* const> paths,
                                const GpuUuid& uuid, std::unique_ptr<GpuModel>* out) {
  if (const auto status = load_cuda()) return status;
  if (!connection.check_alive()) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon of this session is gone: reconnect first");
  }
  ModelFiles files;
  if (const auto status = ModelFiles::open(paths, &files)) return status;
  std::unique_ptr<GpuMapping> mapping;
  if (const auto status = GpuMapping::open(connection, files, uuid, &mapping)) return status;
  out->reset(new GpuModel(session, std::move(files), uuid, std::move(mapping)));
  return MOECACHED_OK;
}

GpuModel::GpuModel(Session& session, ModelFiles files, const GpuUuid& uuid,
                   std::unique_ptr<GpuMapping> mapping)
    : session_(session), files_(std::move(files)), uuid_(uuid), mapping_(std::move(mapping)) {
  for (const LayerLayout& layer : mapping_->layout().model.layers) {
    auto& names = part_names_.emplace_back();
    for (const moecached_shm_part& part : layer.parts) names.emplace_back(part.name);
  }
  read_shapes();
}

GpuModel::~GpuModel() = default;

// `shapes` first: what changes after it is found by the next look.
void GpuModel::read_shapes() {
  const GpuSegmentWords& words = mapping_->words();
  shapes_seen_.store(load_acquire(&words.gpu->shapes), std::memory_order_relaxed);
  shapes_.resize(n_layers());
  for (std::uint32_t l = 0; l < n_layers(); ++l) {
    shapes_[l] = load_acquire(&words.layers[l].shape);
  }
  host_only_.store(
      std::ranges::all_of(shapes_, [](auto shape) { return shape == MOECACHED_SHAPE_HOST_ONLY; }),
      std::memory_order_relaxed);
}

moecached_status GpuModel::map_chunks() {
  return session_.locked(
      [this](Session::Locked locked) { return mapping_->map_chunks(locked.connection()); });
}

void GpuModel::refresh_shapes() {
  session_.locked([this](Session::Locked) {
    if (load_acquire(&mapping_->words().gpu->shapes) == shapes_seen()) return;  // another lane was faster
    read_shapes();
    generation_.fetch_add(1, std::memory_order_release);
  });
}

moecached_status GpuModel::layer_info(std::uint32_t layer, moecached_gpu_layer_info* out) const {
  if (layer >= n_layers()) {
    return fail(MOECACHED_E_ARGUMENT, "the model has %u MoE layers, there is none with index %u", n_layers(),
                layer);
  }
  const moecached_shm_layer& facts = mapping_->layout().model.layers[layer].layer;
  out->block = facts.block;
  out->n_experts = facts.n_experts;
  out->n_parts = facts.n_parts;
  const std::uint32_t shape = shapes_[layer];
  const bool whole = shape != MOECACHED_SHAPE_ALL_RESIDENT && shape != MOECACHED_SHAPE_HOST_ONLY;
  out->all_resident = shape == MOECACHED_SHAPE_ALL_RESIDENT ? 1 : 0;
  out->by_expert = shape == MOECACHED_SHAPE_HOST_ONLY ? 1 : 0;
  out->n_slots = whole ? facts.host_first + facts.n_experts : facts.n_experts;
  out->table = shape == MOECACHED_SHAPE_HOST_ONLY ? mapping_->identity_table() : mapping_->table(layer);
  const GpuScratch* scratch = mapping_->scratch();
  out->n_slots_fetched = scratch == nullptr || out->all_resident != 0 ? 0
                         : out->by_expert != 0 ? scratch->slots_end(layer) - facts.host_first
                                               : scratch->slots_end(layer);
  out->reserved0 = 0;
  return MOECACHED_OK;
}

moecached_status GpuModel::part_info(std::uint32_t layer, std::uint32_t part, moecached_part_info* out,
                                     std::uint64_t* window) const {
  if (layer >= part_names_.size() || part >= part_names_[layer].size()) {
    return fail(MOECACHED_E_ARGUMENT, "the model has no part %u in MoE layer %u", part, layer);
  }
  const moecached_shm_part& facts = mapping_->layout().model.layers[layer].parts[part];
  out->name = part_names_[layer][part].c_str();
  out->kind = facts.kind;
  out->ggml_type = facts.ggml_type;
  out->ne0 = facts.ne0;
  out->ne1 = facts.ne1;
  out->expert_bytes = facts.expert_bytes;
  out->slot_offset = 0;
  out->file = facts.file;
  out->file_offset = facts.file_offset;
  *window = mapping_->window(mapping_->layout().part_index(layer, part));
  const moecached_shm_layer& slots = mapping_->layout().model.layers[layer].layer;
  if (shapes_[layer] == MOECACHED_SHAPE_HOST_ONLY)
    *window += std::uint64_t{slots.host_first} * facts.expert_bytes;
  if (shapes_[layer] == MOECACHED_SHAPE_ALL_RESIDENT)
    *window += std::uint64_t{slots.device_first} * facts.expert_bytes;
  return MOECACHED_OK;
}

moecached_status GpuModel::locate(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                                  std::uint32_t* file, std::uint64_t* offset) const {
  return mapping_->layout().model.locate(layer, part, expert, file, offset);
}

moecached_status GpuModel::find(std::string_view tensor, std::uint32_t* layer, std::uint32_t* part) const {
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

moecached_status GpuModel::open_lane(Connection& connection, GpuLane** out) {
  lanes_.reserve(lanes_.size() + 1);
  std::unique_ptr<GpuLane> lane;
  if (const auto status = GpuLane::open(*this, *mapping_, &lane)) return status;
  LaneBlock* block = nullptr;
  if (const auto status = connection.take_lane(mapping_->model_id(), LaneUse::kGpuLog, &block)) return status;
  if (const auto status = lane->attach(*mapping_, connection, block)) {
    connection.give_back_lane(block);
    return status;
  }
  *out = lane.get();
  lanes_.push_back(std::move(lane));
  return MOECACHED_OK;
}

void GpuModel::close_lane(Connection& connection, GpuLane* lane) {
  connection.give_back_lane(lane->block());
  if (scratch_lane_ == lane) scratch_lane_ = nullptr;
  std::erase_if(lanes_, [lane](const auto& owned) { return owned.get() == lane; });
}

moecached_status GpuModel::open_scratch(const GpuLane& lane, std::uint32_t* n_slots) {
  if (scratch_lane_ != nullptr && scratch_lane_ != &lane) return MOECACHED_OK;
  if (mapping_->scratch() == nullptr) {
    if (const auto status = mapping_->open_scratch()) return status;
    if (mapping_->scratch() == nullptr) return MOECACHED_OK;
    generation_.fetch_add(1, std::memory_order_release);
  }
  scratch_lane_ = &lane;
  *n_slots = mapping_->scratch()->n_slots();
  return MOECACHED_OK;
}

moecached_status GpuModel::prepare(Connection& next) {
  if (const auto status = GpuMapping::open(next, files_, uuid_, &next_)) return status;
  if (!next_->layout().model.same_experts(mapping_->layout().model)) {
    return fail(MOECACHED_E_VERSION, "the new daemon describes %s in another way than the last one: restart",
                files_.first_path());
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    LaneBlock* block = nullptr;
    if (const auto status = next.take_lane(next_->model_id(), LaneUse::kGpuLog, &block)) return status;
    next_blocks_.push_back(block);
    if (const auto status = GpuLane::check_attach(*next_, block)) return status;
  }
  return MOECACHED_OK;
}

moecached_status GpuModel::ready() {
  switch (load_acquire(&next_->words().gpu->load_state)) {
    case MOECACHED_COVERED:
      return MOECACHED_OK;
    case MOECACHED_LOADING:
      return fail(MOECACHED_E_UNAVAILABLE, "the new daemon is still loading %s", files_.first_path());
    default:
      return fail(MOECACHED_E_IO, "the new daemon could not read %s", files_.first_path());
  }
}

void GpuModel::commit(Connection& last, Connection& next) {
  // Graphs that were submitted still read the old windows and write the old words.
  (void)mapping_->synchronize();
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    last.give_back_lane(lanes_[i]->block());
    (void)lanes_[i]->attach(*next_, next, next_blocks_[i]);  // checked in prepare()
  }
  next_blocks_.clear();
  scratch_lane_ = nullptr;
  mapping_ = std::move(next_);  // the old one ends here, behind the new lanes
  read_shapes();
  generation_.fetch_add(1, std::memory_order_release);
}

void GpuModel::forget(Connection& next) {
  for (LaneBlock* block : next_blocks_) next.give_back_lane(block);
  next_blocks_.clear();
  next_.reset();
}

}  // namespace moecached::client
