#include "daemon/ipc/gpu_model.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/ipc/shm_part.h"
#include "daemon/platform/futex.h"
#include "daemon/residency/brain.h"

namespace moecached {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kLogEntries = 16;  // epochs; the daemon looks every millisecond while a lane is busy
constexpr std::uint32_t kGrowthsMax = 8;   // times that device slots can be added

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Result<std::shared_ptr<GpuModel>> GpuModel::create(Parameters parameters, ModelId id, Gpu& gpu) {
  std::shared_ptr<GpuModel> model(new GpuModel(std::move(parameters), id, gpu));
  if (Status done = model->allocate(); !done) {
    return std::move(done).error().with_context("pinned memory for every expert of the model (" +
                                                std::to_string(model->p_.layout.expert_bytes_total >> 20) +
                                                " MiB)");
  }
  if (Status done = model->write_segment(); !done) return std::move(done).error();
  return model;
}

GpuModel::GpuModel(Parameters parameters, ModelId id, Gpu& gpu)
    : use(parameters.layout.layers.size()), p_(std::move(parameters)), id_(id), gpu_(gpu) {
  wanted_ = gpu_slots_wanted(p_.layout, p_.slots);
  std::vector<std::uint32_t> room;
  for (std::size_t l = 0; l < p_.layout.layers.size(); ++l)
    room.push_back(slot_room(p_.scope, wanted_[l], p_.layout.layers[l].n_experts));
  const std::uint32_t n_sections = gpu_sections_that_fit(p_.layout, room, p_.place.n, gpu.granularity());
  peer_group_ = p_.place.own / n_sections;
  std::uint32_t parts = 0, entries = 0;
  for (std::size_t l = 0; l < p_.layout.layers.size(); ++l) {
    const LayerLayout& layer = p_.layout.layers[l];
    plans_.push_back(plan_gpu_layer(layer, room[l], {.own = p_.place.own % n_sections, .n = n_sections},
                                    gpu.granularity()));
    first_part_.push_back(parts);
    table_first_.push_back(entries);
    parts += static_cast<std::uint32_t>(layer.parts.size());
    entries += layer.n_experts;
    std::uint64_t bytes = 0;
    for (const PartLayout& part : layer.parts) bytes += part.expert_bytes;
    expert_bytes_.push_back(bytes);
    experts_.emplace_back(room[l], kNowhere);
    own_slot_.emplace_back(layer.n_experts, kNowhere);
  }
  n_slots_.assign(p_.layout.layers.size(), 0);
  backed_.assign(parts, 0);
}

Status GpuModel::allocate() {
  if (p_.ram && p_.ram->fits(plans_)) {
    if (Status opened = p_.ram->open_to(gpu_); opened) {
      ram_ = p_.ram;
    } else {
      spdlog::warn("model {} ({}): in RAM a second time: {}", id_.value, p_.name, opened.error().text);
    }
  }
  p_.ram.reset();
  if (!ram_) {
    auto ram = ExpertRam::create(gpu_, plans_);
    if (!ram) return std::move(ram).error();
    ram_ = *std::move(ram);
    for (const LayerLayout& layer : p_.layout.layers)
      ram_->loads_left += layer.parts.size() * ((layer.n_experts + kMaxPartReads - 1) / kMaxPartReads);
  }
  for (std::size_t l = 0; l < plans_.size(); ++l) {
    for (std::size_t p = 0; p < plans_[l].parts.size(); ++p) {
      const std::uint64_t bytes = gpu_part_bytes(plans_[l], p, p_.layout.layers[l].parts[p],
                                                 plans_[l].n_device_max, gpu_.granularity());
      device_.emplace_back();
      if (bytes == 0) continue;
      auto device = gpu_.reserve(bytes);
      if (!device) return std::move(device).error();
      device_.back() = *std::move(device);
    }
  }
  return ok();
}

Status GpuModel::write_segment() {
  const std::size_t n_layers = p_.layout.layers.size();
  const std::size_t n_parts = ram_->n_parts();
  const std::size_t n_chunks_max = n_parts * kGrowthsMax * plans_.front().first.size();
  std::size_t n_entries = 0;
  std::uint32_t n_experts_max = 0;
  for (const LayerLayout& layer : p_.layout.layers) {
    n_entries += layer.n_experts;
    n_experts_max = std::max(n_experts_max, layer.n_experts);
  }
  std::vector<std::int32_t> identity(n_experts_max);
  std::iota(identity.begin(), identity.end(), 0);

  std::uint64_t at = sizeof(moecached_shm_header) + sizeof(moecached_shm_model);
  auto place = [&at](std::uint64_t bytes) { return std::exchange(at, round_up(at + bytes, 64)); };
  at = round_up(at, 64);
  // The words that are looked at for every graph have a cache line of their own.
  gpu_offset_ = place(sizeof(moecached_shm_gpu));
  layers_offset_ = place(n_layers * sizeof(moecached_shm_layer));
  const std::uint64_t parts_offset =
      place(n_parts * sizeof(moecached_shm_part) + count_extents(p_.layout) * sizeof(moecached_shm_extent));
  const std::uint64_t windows_offset = place(n_parts * sizeof(moecached_shm_window));
  const std::uint64_t chunks_offset = place(n_chunks_max * sizeof(moecached_shm_chunk));
  const std::uint64_t table_offset = place(n_entries * sizeof(std::int32_t));
  auto segment = Memfd::create("gpu-model", round_up(at, kPage), ClientAccess::kReadOnly);
  if (!segment) return std::move(segment).error();
  segment_ = *std::move(segment);
  std::byte* const base = segment_.bytes().data();

  auto* layers = reinterpret_cast<moecached_shm_layer*>(base + layers_offset_);
  PartWriter parts(reinterpret_cast<moecached_shm_part*>(base + parts_offset), p_.layout);
  auto* windows = reinterpret_cast<moecached_shm_window*>(base + windows_offset);
  table_ = reinterpret_cast<std::int32_t*>(base + table_offset);
  for (std::size_t l = 0; l < n_layers; ++l) {
    const LayerLayout& from = p_.layout.layers[l];
    layers[l] = moecached_shm_layer{.block = from.block,
                                    .n_experts = from.n_experts,
                                    .n_parts = static_cast<std::uint32_t>(from.parts.size()),
                                    .first_part = first_part_[l],
                                    .slot_class = from.slot_class,
                                    .n_slots = 0,
                                    .table_first = table_first_[l],
                                    .host_first = plans_[l].host_first,
                                    .window_offset = 0,
                                    .window_bytes = 0,
                                    .slot_stride = 0,
                                    .shape = MOECACHED_SHAPE_HOST_ONLY,
                                    .device_first = plans_[l].own_first()};
    for (std::size_t p = 0; p < from.parts.size(); ++p) {
      parts.write(from.parts[p], 0);
      windows[first_part_[l] + p] = {plans_[l].parts[p].device_bytes, plans_[l].parts[p].host_bytes};
    }
    for (std::uint32_t e = 0; e < from.n_experts; ++e)
      table_[table_first_[l] + e] = static_cast<std::int32_t>(plans_[l].host_first + e);
  }

  auto* model = reinterpret_cast<moecached_shm_model*>(base + sizeof(moecached_shm_header));
  model->model_id = id_.value;
  model->n_layers = static_cast<std::uint32_t>(n_layers);
  model->n_parts = static_cast<std::uint32_t>(n_parts);
  model->n_files = p_.layout.n_files;
  model->n_expert_used = p_.layout.n_expert_used;
  model->layers_offset = layers_offset_;
  model->n_extents = parts.n_extents();
  model->parts_offset = parts_offset;
  model->table_offset = table_offset;
  copy_name(model->name, p_.name);

  moecached_shm_gpu& gpu = gpu_words();
  std::ranges::copy(gpu_.id().uuid, gpu.uuid);
  gpu.granularity = gpu_.granularity();
  gpu.identity_first = n_entries;
  gpu.table_bytes = round_up((n_entries + identity.size()) * sizeof(std::int32_t), gpu_.granularity());
  gpu.windows_offset = windows_offset;
  gpu.chunks_offset = chunks_offset;
  gpu.n_chunks_max = static_cast<std::uint32_t>(n_chunks_max);
  gpu.log_entries = kLogEntries;
  gpu.log_layer_bytes =
      MOECACHED_LOG_TOKENS * p_.layout.n_expert_used * static_cast<std::uint32_t>(sizeof(std::int32_t));
  gpu.log_slots_offset = static_cast<std::uint32_t>(
      round_up(sizeof(moecached_shm_log_entry) + n_layers * sizeof(std::uint16_t), 64));
  gpu.log_entry_bytes =
      static_cast<std::uint32_t>(round_up(gpu.log_slots_offset + n_layers * gpu.log_layer_bytes, 64));
  gpu.log_bytes_per_lane = round_up(std::uint64_t{gpu.log_entry_bytes} * kLogEntries, kPage);
  gpu.load_state = MOECACHED_LOADING;

  auto table = gpu_.reserve(gpu.table_bytes);
  if (!table) return std::move(table).error();
  if (Status grown = (*table)->grow(0, gpu.table_bytes); !grown) return grown;
  table_memory_ = *std::move(table);
  if (Status written = gpu_.write(table_memory_->address(), std::as_bytes(std::span(table_, n_entries)));
      !written)
    return written;
  if (Status written = gpu_.write(table_memory_->address() + n_entries * sizeof(std::int32_t),
                                  std::as_bytes(std::span(identity)));
      !written) {
    return written;
  }
  *reinterpret_cast<moecached_shm_header*>(base) = moecached_shm_header{.magic = MOECACHED_SHM_MAGIC,
                                                                        .version = MOECACHED_SHM_VERSION,
                                                                        .kind = MOECACHED_SEGMENT_GPU_MODEL,
                                                                        .bytes = segment_.bytes().size(),
                                                                        .boot_epoch = p_.boot_epoch,
                                                                        .reserved = {}};
  return ok();
}

moecached_shm_gpu& GpuModel::gpu_words() const {
  return *reinterpret_cast<moecached_shm_gpu*>(segment_.bytes().data() + gpu_offset_);
}

moecached_shm_layer& GpuModel::layer_words(LayerIndex layer) const {
  return reinterpret_cast<moecached_shm_layer*>(segment_.bytes().data() + layers_offset_)[layer.value];
}

std::byte* GpuModel::host_slot(LayerIndex layer, std::size_t part, ExpertIndex expert) const {
  const std::uint64_t offset = (std::uint64_t{plans_[layer.value].host_first} + expert.value) *
                               p_.layout.layers[layer.value].parts[part].expert_bytes;
  return ram_->part(first_part_[layer.value] + static_cast<std::uint32_t>(part)) +
         (offset - plans_[layer.value].parts[part].device_bytes);
}

void GpuModel::set_load_state(moecached_load_state state) {
  load_state_ = state;
  moecached_shm_gpu& gpu = gpu_words();
  std::atomic_ref(gpu.load_state).store(static_cast<std::uint32_t>(state), std::memory_order_release);
  futex_wake(&gpu.load_state);
}

void GpuModel::spoil_for_test() {
  for (std::uint32_t e = 0; e < p_.layout.layers.front().n_experts; ++e)
    host_slot(LayerIndex(0), 0, ExpertIndex(e))[1] ^= std::byte{0x14};
}

Status GpuModel::grow(std::span<const std::uint32_t> n_slots) {
  for (std::uint32_t l = 0; l < plans_.size(); ++l) {
    const LayerLayout& layer = p_.layout.layers[l];
    for (std::size_t p = 0; p < layer.parts.size(); ++p) {
      const std::uint32_t index = first_part_[l] + static_cast<std::uint32_t>(p);
      const std::uint64_t have = backed_[index];
      const std::uint64_t want = gpu_part_bytes(plans_[l], p, layer.parts[p], n_slots[l], gpu_.granularity());
      if (want <= have) continue;
      const std::lock_guard lock(chunks_mutex_);
      if (chunks_.size() == gpu_words().n_chunks_max) {
        return Fault{FaultCode::kUnsupported, "device slots were added too often already"};
      }
      if (Status grown = device_[index]->grow(have, want - have); !grown) return grown;
      CHECK(add_chunk({.owner = id_,
                       .part = index,
                       .chunk = device_[index]->chunks() - 1,
                       .offset = plans_[l].parts[p].begin[plans_[l].own] + have,
                       .bytes = want - have}));
      backed_[index] = want;
      device_bytes_ += want - have;
    }
  }
  return ok();
}

moecached_shm_chunk* GpuModel::chunk_words() const {
  return reinterpret_cast<moecached_shm_chunk*>(segment_.bytes().data() + gpu_words().chunks_offset);
}

bool GpuModel::add_chunk(const Chunk& chunk) {
  if (chunks_.size() == gpu_words().n_chunks_max) return false;
  std::uint32_t flags = chunk.owner == id_ ? 0u : std::uint32_t{MOECACHED_CHUNK_PEER};
  if (chunk.is_gone) flags |= MOECACHED_CHUNK_GONE;
  chunk_words()[chunks_.size()] = {
      .part = chunk.part, .flags = flags, .offset = chunk.offset, .bytes = chunk.bytes};
  chunks_.push_back(chunk);
  return true;
}

std::vector<GpuModel::Chunk> GpuModel::own_chunks() const {
  const std::lock_guard lock(chunks_mutex_);
  std::vector<Chunk> own;
  std::ranges::copy_if(chunks_, std::back_inserter(own),
                       [this](const Chunk& chunk) { return chunk.owner == id_; });
  return own;
}

bool GpuModel::add_peer_chunks(const std::shared_ptr<GpuModel>& peer) {
  const std::vector<Chunk> theirs = peer->own_chunks();
  const std::lock_guard lock(chunks_mutex_);
  const auto n_known = static_cast<std::size_t>(std::ranges::count(chunks_, peer->id(), &Chunk::owner));
  for (std::size_t i = n_known; i < theirs.size(); ++i) {
    Chunk chunk = theirs[i];
    chunk.peer = peer;
    if (!add_chunk(chunk)) return false;
  }
  return true;
}

void GpuModel::remove_peer_chunks(const GpuModel& peer) {
  CHECK(sessions == 0);
  {
    const std::lock_guard lock(chunks_mutex_);
    std::vector<Chunk> kept;
    std::ranges::copy_if(std::exchange(chunks_, {}), std::back_inserter(kept),
                         [&](const Chunk& chunk) { return chunk.owner != peer.id(); });
    for (const Chunk& chunk : kept) CHECK(add_chunk(chunk));
  }
  publish_chunks();
}

void GpuModel::give_up_peer_chunks(const GpuModel& peer) {
  const std::lock_guard lock(chunks_mutex_);
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].owner != peer.id()) continue;
    chunks_[i].is_gone = true;
    // Before share_chunk answers with something else: whoever has that handle sees the flag.
    std::atomic_ref(chunk_words()[i].flags)
        .store(MOECACHED_CHUNK_PEER | MOECACHED_CHUNK_GONE, std::memory_order_seq_cst);
  }
}

void GpuModel::publish_growth(std::span<const std::uint32_t> n_slots) {
  n_slots_.assign(n_slots.begin(), n_slots.end());
  for (std::uint32_t l = 0; l < n_slots_.size(); ++l) layer_words(LayerIndex(l)).n_slots = n_slots_[l];
  publish_chunks();
}

void GpuModel::publish_chunks() {
  // Sequentially consistent: the lanes' epochs are looked at next.
  std::atomic_ref(gpu_words().n_chunks).store(n_chunks(), std::memory_order_seq_cst);
}

void GpuModel::set_shape(LayerIndex layer, moecached_gpu_shape shape) {
  std::atomic_ref(layer_words(layer).shape)
      .store(static_cast<std::uint32_t>(shape), std::memory_order_release);
  std::atomic_ref shapes(gpu_words().shapes);
  shapes.store(shapes.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

GpuQueue::Flip GpuModel::flip(LayerIndex layer, ExpertIndex expert, std::int32_t entry) {
  const std::size_t index = table_first_[layer.value] + expert.value;
  std::atomic_ref(table_[index]).store(entry, std::memory_order_relaxed);
  return {.address = table_memory_->address() + index * sizeof(std::int32_t), .value = entry};
}

void GpuModel::put(LayerIndex layer, ExpertIndex expert, SlotIndex slot) {
  CHECK(slot.value < n_slots_[layer.value]);
  experts_[layer.value][slot.value] = expert.value;
  own_slot_[layer.value][expert.value] = slot.value;
}

void GpuModel::take(LayerIndex layer, ExpertIndex expert) { own_slot_[layer.value][expert.value] = kNowhere; }

std::uint64_t GpuModel::slot_address(LayerIndex layer, std::size_t part, std::int32_t entry) const {
  const GpuLayerPlan& plan = plans_[layer.value];
  const std::uint64_t in_window =
      static_cast<std::uint64_t>(entry) * p_.layout.layers[layer.value].parts[part].expert_bytes;
  return device_[first_part_[layer.value] + part]->address() + (in_window - plan.parts[part].begin[plan.own]);
}

GpuQueue::Job GpuModel::copy_job(LayerIndex layer, ExpertIndex expert, SlotIndex slot) const {
  CHECK(slot.value < n_slots_[layer.value]);
  const LayerLayout& from = p_.layout.layers[layer.value];
  static_assert(GpuQueue::kCopiesMax >= MOECACHED_MAX_PARTS);
  GpuQueue::Job job;
  job.n_copies = static_cast<std::uint32_t>(from.parts.size());
  for (std::size_t p = 0; p < from.parts.size(); ++p) {
    job.copies[p] = {.destination = slot_address(layer, p, device_entry(layer, slot.value)),
                     .source = host_slot(layer, p, expert),
                     .bytes = from.parts[p].expert_bytes};
  }
  return job;
}

Result<UniqueFd> GpuModel::share_chunk(std::uint32_t index) const {
  Chunk chunk;
  {
    const std::lock_guard lock(chunks_mutex_);
    if (index >= chunks_.size()) return Fault{FaultCode::kNotFound, "that memory is gone"};
    chunk = chunks_[index];
    if (chunk.owner == id_) return device_[chunk.part]->share(chunk.chunk);
  }
  if (chunk.is_gone) return table_memory_->share(0);  // any handle: it is not mapped
  const std::shared_ptr<const GpuModel> peer = chunk.peer.lock();
  if (!peer) return Fault{FaultCode::kNotFound, "that memory is gone: its model was dropped"};
  const std::lock_guard lock(peer->chunks_mutex_);  // its ranges grow meanwhile
  return peer->device_[chunk.part]->share(chunk.chunk);
}

std::uint32_t GpuModel::n_chunks() const {
  const std::lock_guard lock(chunks_mutex_);
  return static_cast<std::uint32_t>(chunks_.size());
}

}  // namespace moecached
