#include "daemon/ipc/vram_slots.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/model/ggml_types.h"
#include "daemon/platform/huge_pages.h"

namespace moecached {
namespace {

// Kernels that take a row in steps of 512 elements read past the last row of an expert.
constexpr std::uint64_t kReadPast = 4096;
constexpr std::uint64_t kScratchSlotsMax = 1024;  // of a client

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

const std::byte* as_source(std::uint64_t address) {
  return reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(address));  // NOLINT
}

}  // namespace

Result<std::unique_ptr<VramSlots>> VramSlots::create(const ModelLayout& layout, Gpu& gpu) {
  std::unique_ptr<VramSlots> slots(new VramSlots(layout, gpu));
  std::map<std::uint32_t, std::uint32_t> first_of_class;
  for (const LayerLayout& layer : layout.layers) {
    const auto n_arrays = static_cast<std::uint32_t>(slots->arrays_.size());
    const auto [known, is_new] = first_of_class.emplace(layer.slot_class, n_arrays);
    std::uint64_t expert_bytes = 0;
    for (const PartLayout& part : layer.parts) {
      if (is_new) {
        const GgmlType* const type = find_ggml_type(part.ggml_type);
        const std::uint64_t blocks = part.expert_bytes / (type == nullptr ? 1 : type->block_bytes);
        slots->arrays_.push_back(
            {.expert_bytes = part.expert_bytes, .blocks = blocks, .n_layers = 0, .memory = {}});
      }
      expert_bytes += part.expert_bytes;
    }
    slots->places_.push_back({known->second, slots->arrays_[known->second].n_layers});
    for (std::size_t p = 0; p < layer.parts.size(); ++p) ++slots->arrays_[known->second + p].n_layers;
    slots->spare_bytes_ = std::max(slots->spare_bytes_, round_up(expert_bytes, 256));
  }
  auto queue = gpu.create_queue();
  if (!queue) return std::move(queue).error();
  slots->queue_ = *std::move(queue);
  for (std::uint32_t spare = 0; spare < kSpares; ++spare) slots->free_spares_.push_back(spare);
  return slots;
}

Status VramSlots::prepare(std::span<std::byte> pool) {
  HugePages pages(pool);
  (void)pages.prepare(pool.data(), pool.size());  // 4 KiB pages do as well, at a third of a disk's speed
  // What is left, so that pinning does not meet holes one by one. Older kernels have no such advice; pinning
  // populates as well.
#ifdef MADV_POPULATE_WRITE
  if (::madvise(pool.data(), pool.size(), MADV_POPULATE_WRITE) != 0 && errno == ENOMEM)
    return Fault{FaultCode::kLimit, "there is no memory for a pool of " + std::to_string(pool.size() >> 20) +
                                        " MiB: lower pool.bytes"};
#endif
  auto pin = gpu_.pin(pool);
  if (!pin) return std::move(pin).error();
  pin_ = *std::move(pin);
  return ok();
}

std::uint64_t VramSlots::array_bytes(std::size_t array, std::uint32_t n_slots) const {
  const Array& a = arrays_[array];
  return round_up(std::uint64_t{a.n_layers} * n_slots * a.expert_bytes + kReadPast, gpu_.granularity());
}

std::uint32_t VramSlots::n_slots_max() const {
  std::uint64_t smallest = gpu_.granularity(), n_max = UINT32_MAX;
  for (const Array& array : arrays_) smallest = std::min(smallest, array.expert_bytes);
  // Ids are the same for all parts of a layer, so those of the smallest part, whose array is rounded up,
  // count.
  const std::uint64_t behind = gpu_.granularity() / smallest + kScratchSlotsMax;
  for (const Array& array : arrays_) {
    const std::uint64_t in_all = INT32_MAX / std::max<std::uint64_t>(array.blocks, 1);
    n_max = std::min(n_max, in_all > behind ? (in_all - behind) / array.n_layers : 0);
  }
  return static_cast<std::uint32_t>(n_max);
}

std::uint64_t VramSlots::bytes_for(std::uint32_t n_slots) const {
  std::uint64_t bytes = round_up(kSpares * spare_bytes_, gpu_.granularity());
  for (std::size_t i = 0; i < arrays_.size(); ++i) bytes += array_bytes(i, n_slots);
  return bytes;
}

Status VramSlots::allocate(std::uint32_t n_slots) {
  const auto backed = [this](std::uint64_t bytes) -> Result<std::unique_ptr<GpuRange>> {
    auto range = gpu_.reserve(bytes);
    if (!range) return std::move(range).error();
    if (Status grown = (*range)->grow(0, bytes); !grown) return std::move(grown).error();
    return range;
  };
  auto spares = backed(round_up(kSpares * spare_bytes_, gpu_.granularity()));
  if (!spares) return std::move(spares).error();
  std::vector<std::unique_ptr<GpuRange>> ranges;
  for (std::size_t i = 0; i < arrays_.size(); ++i) {
    auto range = backed(array_bytes(i, n_slots));
    if (!range) return std::move(range).error();
    ranges.push_back(*std::move(range));
  }
  spares_ = *std::move(spares);
  for (std::size_t i = 0; i < arrays_.size(); ++i) arrays_[i].memory = std::move(ranges[i]);
  n_slots_.store(n_slots, std::memory_order_release);
  return ok();
}

std::uint64_t VramSlots::address(LayerIndex layer, std::size_t part, std::uint32_t device_slot) const {
  const LayerPlace& place = places_[layer.value];
  const Array& array = arrays_[place.first_array + part];
  const std::uint64_t slot = std::uint64_t{place.class_index} * n_slots() + device_slot;
  return array.memory->address() + slot * array.expert_bytes;
}

void VramSlots::copy_up(const Place& place, const std::byte* record, std::uint32_t device_slot) {
  GpuQueue::Job job;
  for (const PartLayout& part : layout_.layers[place.layer.value].parts) {
    job.copies[job.n_copies] = {.destination = address(place.layer, job.n_copies, device_slot),
                                .source = record + part.slot_offset,
                                .bytes = part.expert_bytes};
    bytes_up += part.expert_bytes;
    ++job.n_copies;
  }
  submit(Work::kUp, place, std::move(job));
}

void VramSlots::copy_aside(const Place& place, std::uint32_t device_slot, std::uint32_t spare) {
  GpuQueue::Job job;
  std::uint64_t to = spares_->address() + spare * spare_bytes_;
  for (const PartLayout& part : layout_.layers[place.layer.value].parts) {
    job.copies[job.n_copies] = {.destination = to,
                                .source = as_source(address(place.layer, job.n_copies, device_slot)),
                                .bytes = part.expert_bytes};
    to += part.expert_bytes;
    ++job.n_copies;
  }
  submit(Work::kAside, place, std::move(job));
}

void VramSlots::copy_down(const Place& place, std::uint32_t spare, std::byte* record) {
  GpuQueue::Job job;
  std::uint64_t from = spares_->address() + spare * spare_bytes_;
  for (const PartLayout& part : layout_.layers[place.layer.value].parts) {
    job.copies[job.n_copies] = {.destination = reinterpret_cast<std::uintptr_t>(record + part.slot_offset),
                                .source = as_source(from),
                                .bytes = part.expert_bytes};
    from += part.expert_bytes;
    bytes_down += part.expert_bytes;
    ++job.n_copies;
  }
  submit(Work::kDown, place, std::move(job));
}

void VramSlots::run(std::function<void()> call) {
  GpuQueue::Job job;
  job.call = std::move(call);
  submit(Work::kAllocate, {}, std::move(job));
}

// Never more at once than there are spares, and the two steps of each: the queue has room.
void VramSlots::submit(Work work, const Place& place, GpuQueue::Job job) {
  if (free_pending_.empty()) {
    free_pending_.push_back(static_cast<std::uint32_t>(pending_.size()));
    pending_.emplace_back();
  }
  job.tag = free_pending_.back();
  free_pending_.pop_back();
  pending_[job.tag] = {.work = work, .place = place, .ok = true};
  queue_->submit(std::move(job));
}

void VramSlots::poll(std::vector<Done>* done) {
  queue_done_.clear();
  queue_->poll(&queue_done_);
  for (const GpuQueue::Done& one : queue_done_) {
    done->push_back(pending_[one.tag]);
    done->back().ok = one.ok;
    free_pending_.push_back(static_cast<std::uint32_t>(one.tag));
  }
}

std::optional<std::uint32_t> VramSlots::take_spare() {
  if (free_spares_.empty()) return std::nullopt;
  const std::uint32_t spare = free_spares_.back();
  free_spares_.pop_back();
  return spare;
}

}  // namespace moecached
