#include "daemon/tier/region_registry.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moecached {
namespace {

constexpr std::uint64_t kChunkBytesMin = 64u << 20;
constexpr std::uint64_t kChunksPerRegion =
    512;  // of the kernel's 16384 buffers; 16 models are allowed by default

}  // namespace

void RegionRegistry::add(std::span<std::byte> region, std::vector<SlotWindow> traded) {
  if (region.empty()) return;
  const std::uint64_t share =
      (region.size() / kChunksPerRegion + kChunkBytesMin - 1) / kChunkBytesMin * kChunkBytesMin;
  Region entry{
      region, HugePages(region), std::clamp(share, kChunkBytesMin, kRegisterBytesMax), {}, std::move(traded)};
  entry.bytes_read.assign((region.size() + entry.chunk_bytes - 1) / entry.chunk_bytes, 0);
  regions_.push_back(std::move(entry));
}

void RegionRegistry::remove(std::span<std::byte> region) {
  const auto entry = std::find_if(regions_.begin(), regions_.end(),
                                  [&](const Region& r) { return r.memory.data() == region.data(); });
  if (entry == regions_.end()) return;
  for (std::size_t i = 0; i < entry->bytes_read.size(); ++i) {
    if (entry->bytes_read[i] == kRegistered) engine_.unregister_memory(chunk_of(*entry, i));
  }
  regions_.erase(entry);
  refused_ = false;
}

RegionRegistry::Region* RegionRegistry::region_of(const std::byte* memory) {
  for (Region& region : regions_) {
    if (memory >= region.memory.data() && memory < region.memory.data() + region.memory.size())
      return &region;
  }
  return nullptr;
}

std::string RegionRegistry::prepare(const std::byte* memory, std::uint64_t n_bytes) {
  Region* const region = region_of(memory);
  if (region == nullptr) return {};
  if (region->traded.empty()) return region->huge_pages.prepare(memory, n_bytes);
  return region->huge_pages.prepare(memory, n_bytes, slot_around(*region, memory));
}

// Empty between two windows.
std::span<std::byte> RegionRegistry::slot_around(const Region& region, const std::byte* memory) {
  const auto offset = static_cast<std::uint64_t>(memory - region.memory.data());
  const auto behind = std::ranges::upper_bound(region.traded, offset, {}, &SlotWindow::offset);
  if (behind == region.traded.begin()) return {};
  const SlotWindow& window = *std::prev(behind);
  const std::uint64_t slot = (offset - window.offset) / window.slot_bytes;
  if (slot >= window.n_slots) return {};
  return region.memory.subspan(window.offset + slot * window.slot_bytes, window.slot_bytes);
}

void RegionRegistry::released(std::span<const std::byte> memory) {
  if (Region* const region = region_of(memory.data())) region->huge_pages.forget(memory);
}

std::string RegionRegistry::note_read(const std::byte* memory, std::uint64_t n_bytes) {
  Region* const region = refused_ ? nullptr : region_of(memory);
  if (region == nullptr || !region->traded.empty()) return {};
  // A read across two chunks counts for the first: what matters is that it gets there, not when.
  const auto chunk = static_cast<std::size_t>(memory - region->memory.data()) / region->chunk_bytes;
  if (region->bytes_read[chunk] == kRegistered) return {};
  region->bytes_read[chunk] += n_bytes;
  const std::span<std::byte> whole = chunk_of(*region, chunk);
  if (region->bytes_read[chunk] < whole.size()) return {};
  if (Status status = engine_.register_memory(whole); !status) {
    refused_ = true;
    return std::move(status).error().text;
  }
  region->bytes_read[chunk] = kRegistered;
  return {};
}

std::span<std::byte> RegionRegistry::chunk_of(const Region& region, std::size_t chunk) {
  const std::uint64_t begin = chunk * region.chunk_bytes;
  return region.memory.subspan(begin, std::min(region.chunk_bytes, region.memory.size() - begin));
}

}  // namespace moecached
