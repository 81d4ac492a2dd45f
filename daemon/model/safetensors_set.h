// The files of one Hugging Face model, read and found to belong together: its safetensors, its config.json,
// and its index if it has one. Which is which, their contents say: descriptors have no names. Thread: any.
// Memory: bounded as in safetensors.h and hf_files.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/model/hf_files.h"
#include "daemon/model/safetensors.h"

namespace moecached {

struct SetTensor {
  SafetensorsTensor tensor;
  std::uint32_t file = 0;  // index of the descriptor
};

struct SafetensorsSet {
  std::uint32_t n_files = 0;  // the JSON files too
  HfConfig config;
  std::vector<SetTensor> tensors;  // in the order of the files; names are distinct
};

// fds: borrowed, in any order.
[[nodiscard]] Result<SafetensorsSet> read_safetensors_set(std::span<const int> fds);

}  // namespace moecached
