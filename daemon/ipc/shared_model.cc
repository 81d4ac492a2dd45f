#include "daemon/ipc/shared_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "daemon/base/check.h"
#include "daemon/ipc/shm_part.h"

namespace moecached {

namespace {

constexpr std::uint64_t kPage = 4096;

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::uint64_t window_bytes(const LayerLayout& layer, std::uint32_t n_slots) {
  return round_up(layer.slot_stride * n_slots, kPage);
}

std::string mib(std::uint64_t bytes) { return std::to_string((bytes + (1u << 20) - 1) >> 20) + " MiB"; }

}  // namespace

std::uint64_t pool_bytes_of(const ModelLayout& layout, std::span<const std::uint32_t> n_slots) {
  std::uint64_t bytes = 0;
  for (std::size_t l = 0; l < n_slots.size(); ++l) bytes += window_bytes(layout.layers[l], n_slots[l]);
  return bytes;
}

void align_slots_to_pages(ModelLayout& layout) {
  for (LayerLayout& layer : layout.layers) layer.slot_stride = round_up(layer.slot_stride, kPage);
}

Result<std::vector<std::uint32_t>> plan_slots(const ModelLayout& layout, const SlotsSpec& spec,
                                              std::uint64_t budget) {
  // A share of each layer's experts, the same for all layers, cut to [top-k, all].
  auto slots_at = [&](double share) {
    std::vector<std::uint32_t> n;
    for (const LayerLayout& layer : layout.layers) {
      const auto wanted =
          static_cast<std::uint32_t>(std::floor(layer.n_experts * std::clamp(share, 0.0, 1.0) + 1e-9));
      n.push_back(std::clamp(wanted, std::min(layout.n_expert_used, layer.n_experts), layer.n_experts));
    }
    return n;
  };
  const std::uint64_t smallest = pool_bytes_of(layout, slots_at(0));
  if (smallest > budget) {
    return Fault{
        FaultCode::kLimit,
        "the pool has " + mib(budget) + " left and this model needs at least " + mib(smallest) +
            " (top-k = " + std::to_string(layout.n_expert_used) +
            " slots in each layer): raise pool.bytes, or drop another model with `moecachectl drop`"};
  }
  std::vector<std::uint32_t> n;
  switch (spec.kind) {
    case SlotsSpec::Kind::kCount:
      n = slots_at(0);
      for (std::size_t l = 0; l < n.size(); ++l) {
        n[l] = std::clamp(static_cast<std::uint32_t>(spec.value), n[l], layout.layers[l].n_experts);
      }
      break;
    case SlotsSpec::Kind::kPercent:
      n = slots_at(spec.value / 100.0);
      break;
    case SlotsSpec::Kind::kAuto:
      n = slots_at(1.0);
      break;
  }
  if (pool_bytes_of(layout, n) <= budget) return n;
  if (spec.kind != SlotsSpec::Kind::kAuto) {
    return Fault{FaultCode::kLimit, "the slots asked for take " + mib(pool_bytes_of(layout, n)) +
                                        ", the pool has " + mib(budget) +
                                        " left: lower pool.slots or raise pool.bytes"};
  }
  // The largest share that fits; the steps are whole slots, so 40 halvings are more than exact.
  double low = 0, high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (pool_bytes_of(layout, slots_at(middle)) <= budget ? low : high) = middle;
  }
  return slots_at(low);
}

std::uint64_t plan_stream_half(const ModelLayout& layout, std::uint64_t stream_bytes_max, bool spills) {
  std::uint64_t largest = 0, whole = 0;
  for (const LayerLayout& layer : layout.layers) {
    for (const PartLayout& part : layer.parts) {
      largest = std::max(largest, part.expert_bytes);
      whole = std::max(whole, part.expert_bytes * layer.n_experts);
    }
  }
  // Eight experts a half keep a disk's queue as busy as a CPU needs it, which computes longer than it reads.
  // A GPU waits for the disk: there a half is copied out while the other alone fills the queue. Small
  // experts: at least 1 MiB, a good read size.
  const std::uint64_t n_experts = spills ? 32 : 8;
  const std::uint64_t wanted =
      std::min({std::max<std::uint64_t>(n_experts * largest, 1u << 20), whole, stream_bytes_max / 2});
  // And a page, for experts that keep their phase in the file (proto/shm/stream_place.h).
  return round_up(std::max(wanted, largest), kPage) + kPage;
}

Result<std::shared_ptr<SharedModel>> SharedModel::create(Parameters p, Device& device) {
  CHECK(p.n_slots.size() == p.layout.layers.size() && p.files.size() == p.layout.n_files);
  std::vector<std::uint32_t> room;
  for (std::size_t l = 0; l < p.n_slots.size(); ++l)
    room.push_back(slot_room(p.scope, p.n_slots[l], p.layout.layers[l].n_experts));
  auto pool = device.create_pool("pool", {pool_bytes_of(p.layout, room), pool_bytes_of(p.layout, p.n_slots)});
  if (!pool) return std::move(pool).error();
  Gpu* const gpu = p.gpu;
  std::shared_ptr<SharedModel> model(new SharedModel(std::move(p), *std::move(pool)));
  if (gpu != nullptr) {
    auto vram = VramSlots::create(model->layout(), *gpu);
    if (!vram) return std::move(vram).error();
    model->device_ = *std::move(vram);
  }
  auto segment = Memfd::create("model", model->segment_bytes_needed(), ClientAccess::kReadOnly);
  if (!segment) return std::move(segment).error();
  model->segment_ = *std::move(segment);
  model->write_segment();
  return model;
}

SharedModel::SharedModel(Parameters parameters, std::unique_ptr<Pool> pool)
    : p_(std::move(parameters)), pool_(std::move(pool)) {
  for (const LayerLayout& layer : p_.layout.layers) {
    limits_.push_back({layer.n_experts, static_cast<std::uint32_t>(layer.parts.size())});
    room_.push_back(slot_room(p_.scope, p_.n_slots[room_.size()], layer.n_experts));
    residence_.emplace_back(room_.back());
  }
}

std::uint64_t SharedModel::segment_bytes_needed() const {
  std::size_t n_entries = 0;
  for (const LayerLayout& layer : p_.layout.layers) n_entries += layer.n_experts;
  std::uint64_t bytes = sizeof(moecached_shm_header) + sizeof(moecached_shm_model) +
                        p_.layout.layers.size() * sizeof(moecached_shm_layer) +
                        count_parts(p_.layout) * sizeof(moecached_shm_part) +
                        count_extents(p_.layout) * sizeof(moecached_shm_extent) + 64 +
                        n_entries * sizeof(std::int32_t);
  if (device_ != nullptr)
    bytes += sizeof(moecached_shm_spill) + device_->n_arrays() * sizeof(moecached_shm_array);
  return round_up(bytes, kPage);
}

void SharedModel::write_segment() {
  std::byte* base = segment_.bytes().data();
  auto* header = reinterpret_cast<moecached_shm_header*>(base);
  auto* model = reinterpret_cast<moecached_shm_model*>(header + 1);
  std::byte* at = reinterpret_cast<std::byte*>(model + 1);
  if (device_ != nullptr) {
    spill_ = reinterpret_cast<moecached_shm_spill*>(at);
    arrays_ = reinterpret_cast<moecached_shm_array*>(spill_ + 1);
    at = reinterpret_cast<std::byte*>(arrays_ + device_->n_arrays());
    *spill_ = {};
    std::ranges::copy(device_->gpu().id().uuid, spill_->uuid);
    spill_->arrays_offset = static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(arrays_) - base);
    spill_->n_arrays = static_cast<std::uint32_t>(device_->n_arrays());
    for (std::size_t i = 0; i < device_->n_arrays(); ++i)
      arrays_[i] = {.expert_bytes = device_->array_expert_bytes(i), .bytes = 0};
  }
  auto* layer = reinterpret_cast<moecached_shm_layer*>(at);
  auto* part = reinterpret_cast<moecached_shm_part*>(layer + p_.layout.layers.size());
  model->layers_offset = static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(layer) - base);
  model->parts_offset = static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(part) - base);

  PartWriter parts(part, p_.layout);
  std::uint64_t window = 0;
  std::uint32_t table_first = 0;
  for (std::size_t l = 0; l < p_.layout.layers.size(); ++l) {
    const LayerLayout& from = p_.layout.layers[l];
    const LayerIndex index(static_cast<std::uint32_t>(l));
    layer[l] = moecached_shm_layer{.block = from.block,
                                   .n_experts = from.n_experts,
                                   .n_parts = static_cast<std::uint32_t>(from.parts.size()),
                                   .first_part = parts.n_parts(),
                                   .slot_class = from.slot_class,
                                   .n_slots = room_[l],
                                   .table_first = table_first,
                                   .class_index = device_ ? device_->class_index(index) : 0,
                                   .window_offset = window,
                                   .window_bytes = window_bytes(from, room_[l]),
                                   .slot_stride = from.slot_stride,
                                   .first_array = device_ ? device_->first_array(index) : 0,
                                   .n_slots_open = p_.n_slots[l]};
    window_offset_.push_back(window);
    table_first_.push_back(table_first);
    window += layer[l].window_bytes;
    table_first += from.n_experts;
    for (const PartLayout& source : from.parts) parts.write(source, source.slot_offset);
  }
  model->table_offset = round_up(static_cast<std::uint64_t>(parts.end() - base), 64);
  layers_ = layer;
  table_ = reinterpret_cast<std::int32_t*>(base + model->table_offset);
  std::fill_n(table_, table_first, MOECACHED_ABSENT);
  model->model_id = p_.id.value;
  model->n_layers = static_cast<std::uint32_t>(p_.layout.layers.size());
  model->n_parts = parts.n_parts();
  model->n_extents = parts.n_extents();
  model->n_files = p_.layout.n_files;
  model->n_expert_used = p_.layout.n_expert_used;
  model->pool_bytes = pool_->bytes();
  model->stream_bytes_per_lane = stream_bytes_per_lane();
  copy_name(model->name, p_.name);
  *header = moecached_shm_header{
      .magic = MOECACHED_SHM_MAGIC,
      .version = MOECACHED_SHM_VERSION,
      .kind = device_ ? std::uint32_t{MOECACHED_SEGMENT_SPILL_MODEL} : std::uint32_t{MOECACHED_SEGMENT_MODEL},
      .bytes = segment_.bytes().size(),
      .boot_epoch = p_.boot_epoch,
      .reserved = {}};
}

std::byte* SharedModel::slot(LayerIndex layer, SlotIndex slot) {
  DCHECK(slot.value < room_[layer.value]);
  return pool_->host_view().data() + slot_offset(layer, slot);
}

ModelShape SharedModel::shape() const {
  ModelShape shape{.layers = {}, .policy = {}, .scope = p_.scope, .n_expert_used = p_.layout.n_expert_used};
  for (std::size_t l = 0; l < room_.size(); ++l) {
    const LayerLayout& layer = p_.layout.layers[l];
    shape.layers.push_back({.n_experts = layer.n_experts,
                            .n_slots = p_.n_slots[l],
                            .n_slots_max = room_[l],
                            .slot_class = layer.slot_class});
  }
  return shape;
}

std::vector<SlotWindow> SharedModel::traded_slots() const {
  std::vector<SlotWindow> windows;
  if (pool_->bytes_backed_max() == pool_->bytes()) return windows;
  for (std::size_t l = 0; l < room_.size(); ++l)
    windows.push_back({window_offset_[l], p_.layout.layers[l].slot_stride, room_[l]});
  return windows;
}

Status SharedModel::release(LayerIndex layer, SlotIndex slot) {
  return pool_->release(slot_offset(layer, slot), slot_bytes(layer));
}

void SharedModel::tell_open(LayerIndex layer, std::uint32_t n_slots) {
  std::atomic_ref(layers_[layer.value].n_slots_open).store(n_slots, std::memory_order_relaxed);
}

std::atomic_ref<std::int32_t> SharedModel::entry(LayerIndex layer, ExpertIndex expert) {
  return std::atomic_ref(table_[table_first_[layer.value] + expert.value]);
}

void SharedModel::publish(LayerIndex layer, ExpertIndex expert, SlotIndex slot) {
  set_residence(layer, static_cast<std::int32_t>(slot.value), expert.value + 1);
  entry(layer, expert).store(static_cast<std::int32_t>(slot.value), std::memory_order_release);
}

void SharedModel::tell_device_slots() {
  for (std::size_t i = 0; i < device_->n_arrays(); ++i)
    arrays_[i].bytes = device_->array_bytes(i, device_->n_slots());
  spill_->n_device_slots = device_->n_slots();
  std::atomic_ref(spill_->has_slots).store(1, std::memory_order_release);
}

void SharedModel::move(LayerIndex layer, ExpertIndex expert, SlotIndex slot) {
  const std::int32_t left =
      entry(layer, expert).exchange(static_cast<std::int32_t>(slot.value), std::memory_order_seq_cst);
  if (left != MOECACHED_ABSENT) set_residence(layer, left, 0);
}

void SharedModel::unpublish(LayerIndex layer, ExpertIndex expert) {
  const std::int32_t slot = entry(layer, expert).exchange(MOECACHED_ABSENT, std::memory_order_seq_cst);
  if (slot != MOECACHED_ABSENT) set_residence(layer, slot, 0);
}

void SharedModel::set_residence(LayerIndex layer, std::int32_t slot, std::uint32_t expert_plus_1) {
  if (slot >= MOECACHED_DEVICE_SLOT) return;  // nobody looks at those
  std::atomic<std::uint64_t>& word = residence_[layer.value][static_cast<std::size_t>(slot)];
  const std::uint64_t stays = (word.load(std::memory_order_relaxed) >> 32) + 1;
  word.store(stays << 32 | expert_plus_1, std::memory_order_release);
}

SharedModel::Residence SharedModel::residence(LayerIndex layer, SlotIndex slot) const {
  // Behind the loads of the bytes, which are the kernel's, in a system call of this thread. GCC refuses
  // fences under ThreadSanitizer, which does not see those loads either.
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
  const std::uint64_t word = residence_[layer.value][slot.value].load(std::memory_order_acquire);
  return {.stays = static_cast<std::uint32_t>(word >> 32),
          .expert_plus_1 = static_cast<std::uint32_t>(word & UINT32_MAX)};
}

}  // namespace moecached
