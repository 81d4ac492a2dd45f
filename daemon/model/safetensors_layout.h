// From the safetensors of a Hugging Face model, with its config.json and the index of its files, to a layout.
// Experts are tensors of their own, found one by one (PartLayout::extents), or lie behind each other in one
// tensor, as in a GGUF. Thread: any. Memory: bounded as in safetensors.h and hf_files.h.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/base/result.h"
#include "daemon/model/model_layout.h"

namespace moecached {

// Whether these files are for read_safetensors_layout: one of them is a safetensors file.
[[nodiscard]] bool has_safetensors(std::span<const int> fds);

// fds and faults: as read_model_layout.
[[nodiscard]] Result<ModelLayout> read_safetensors_layout(std::span<const int> fds,
                                                          std::uint32_t direct_alignment);

}  // namespace moecached
