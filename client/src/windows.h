// The windows of a model: one reservation of addresses, and in it, layer by layer,
//
//   | slots of the daemon (pool segment, read-only) | gap | private slots (anonymous, untouched until needed)
//   | window                                window_bytes    first_private * slot_stride
//
// The gap, smaller than one slot, leads from the page-aligned end of the pool's part to the next multiple of
// the slot stride, so that one stride reaches both kinds of slots. Thread: build on one thread; read from
// any. Memory: owns the reservation; its end unmaps everything.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/private_slots.h"
#include "client/src/resources.h"
#include "client/src/segments.h"

namespace moecached::client {

class WindowSet {
 public:
  struct Window {
    std::byte* address = nullptr;  // slot 0
    std::uint32_t n_window_slots =
        0;  // daemon's, gap and private ones: every id that resolve() may return is below
    std::unique_ptr<PrivateSlots> private_slots;
  };

  [[nodiscard]] static moecached_status map(const ModelLayout& layout, const UniqueFd& pool, WindowSet* out);

  [[nodiscard]] const Window& operator[](std::uint32_t layer) const { return windows_[layer]; }

 private:
  Mapping reservation_;
  std::vector<Window> windows_;
};

}  // namespace moecached::client
