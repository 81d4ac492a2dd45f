// Which parts of the regions that reads go to are registered with the engine. Registering pins memory and so
// populates it, and a pool should cost no more than what has been read into it: a region is cut into chunks,
// and a chunk is registered once as many bytes as it has were read into it, when (nearly) all of it is there
// anyway. Until then reads go there unregistered. Regions get huge pages as reads reach them.
//
// Of a region whose slots are given back one by one nothing is ever registered, since the kernel would go on
// writing into the pages that it had pinned, which are no longer those that anybody reads; and no huge page
// there lies across two slots. Thread: the io thread. Memory: grows with add, not with reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/platform/huge_pages.h"
#include "daemon/tier/read_engine.h"
#include "daemon/tier/slot_window.h"

namespace moecached {

class RegionRegistry {
 public:
  explicit RegionRegistry(ReadEngine& engine) : engine_(engine) {}

  void add(std::span<std::byte> region, std::vector<SlotWindow> traded = {});
  void remove(std::span<std::byte> region);
  void released(std::span<const std::byte> memory);  // of a region with traded slots
  // These bytes are about to be written. Returns why there are no huge pages when that just came out.
  [[nodiscard]] std::string prepare(const std::byte* memory, std::uint64_t n_bytes);
  // Says that a read filled these bytes; returns why registering failed when it just did. After a failure no
  // more is tried until something is removed: the limit is the process', not the chunk's.
  [[nodiscard]] std::string note_read(const std::byte* memory, std::uint64_t n_bytes);
  [[nodiscard]] bool refused() const { return refused_; }

 private:
  struct Region {
    std::span<std::byte> memory;
    HugePages huge_pages;
    std::uint64_t chunk_bytes = 0;
    std::vector<std::uint64_t> bytes_read;  // by chunk; kRegistered once registered
    std::vector<SlotWindow> traded;         // ascending; empty: fixed memory
  };
  static constexpr std::uint64_t kRegistered = ~std::uint64_t{0};
  [[nodiscard]] Region* region_of(const std::byte* memory);
  static std::span<std::byte> slot_around(const Region& region, const std::byte* memory);
  static std::span<std::byte> chunk_of(const Region& region, std::size_t chunk);

  ReadEngine& engine_;
  std::vector<Region> regions_;
  bool refused_ = false;
};

}  // namespace moecached
