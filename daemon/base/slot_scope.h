// Within what slots are shared out. Thread: any.
#pragma once

#include <cstdint>

namespace moecached {

enum class SlotScope : std::uint8_t {
  kLayer,   // each layer keeps the slots that it begins with
  kGlobal,  // layers of one slot class trade them
};

}  // namespace moecached
