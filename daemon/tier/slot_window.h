// Where the slots of one layer lie in memory whose slots are given back one by one. Thread: any.
#pragma once

#include <cstdint>

namespace moecached {

struct SlotWindow {
  std::uint64_t offset = 0;  // of slot 0, bytes from the start of the region
  std::uint64_t slot_bytes = 0;
  std::uint32_t n_slots = 0;
};

}  // namespace moecached
