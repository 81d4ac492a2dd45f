// What a tensor's name says about it: a part of routed experts, something that looks like one and is not
// served, or nothing to do with experts (attention, norms, routers, shared experts: every token uses those).
// Names only, no shapes.
#pragma once

#include <cstdint>
#include <string_view>

#include "proto/shm/layout.h"

namespace moecached {

enum class TensorRole : std::uint8_t { kOther, kPart, kLeftOut };

struct TensorName {
  TensorRole role = TensorRole::kOther;
  std::uint32_t block = 0;                         // kPart: N of "blk.N."
  moecached_part_kind kind = MOECACHED_PART_GATE;  // kPart
  std::string_view reason;                         // kLeftOut: a sentence, static storage
};

[[nodiscard]] TensorName classify_tensor(std::string_view name);

// "ffn_gate_exps.weight"
[[nodiscard]] std::string_view part_suffix(moecached_part_kind kind);

[[nodiscard]] constexpr bool is_bias(moecached_part_kind kind) { return kind >= MOECACHED_PART_GATE_BIAS; }
// REQUIRES: is_bias(bias).
[[nodiscard]] constexpr moecached_part_kind weight_of(moecached_part_kind bias) {
  return static_cast<moecached_part_kind>(bias - MOECACHED_PART_GATE_BIAS);
}
static_assert(weight_of(MOECACHED_PART_DOWN_BIAS) == MOECACHED_PART_DOWN);
static_assert(weight_of(MOECACHED_PART_GATE_UP_BIAS) == MOECACHED_PART_GATE_UP);

// Takes a number without sign or leading zeros, and the dot behind it, off the front of a tensor's name. A
// second spelling of a number would give one block or expert two tensors of one kind.
[[nodiscard]] bool take_number(std::string_view& text, std::uint32_t& number);

}  // namespace moecached
