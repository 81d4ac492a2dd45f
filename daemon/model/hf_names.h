// expert_names.h for the names that Hugging Face models give their tensors. Names only, no shapes.
//
//   model.layers.3.mlp.experts.7.gate_proj.weight           one tensor an expert: gate_proj, up_proj,
//   down_proj model.layers.3.block_sparse_moe.experts.7.w1.weight     the same: w1 is gate, w2 is down, w3 is
//   up model.layers.3.mlp.experts.gate_up_proj                 one tensor for all experts: gate_up_proj,
//   down_proj, ..
#pragma once

#include <cstdint>
#include <string_view>

#include "daemon/model/expert_names.h"

namespace moecached {

struct HfTensorName {
  TensorRole role = TensorRole::kOther;
  std::string_view stack;   // kPart: what comes before "layers.N": layers of one model share it
  std::uint32_t block = 0;  // kPart: N of "layers.N."
  moecached_part_kind kind = MOECACHED_PART_GATE;  // kPart
  bool single = false;                             // kPart: of one expert
  std::uint32_t expert = 0;                        // single
  std::string_view before_expert, behind_expert;   // single: the name without the expert's number
  std::string_view reason;                         // kLeftOut: a sentence, static storage
};

// What it returns points into `name`.
[[nodiscard]] HfTensorName classify_hf_tensor(std::string_view name);

}  // namespace moecached
