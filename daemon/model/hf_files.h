// The two JSON files beside the safetensors of a model: config.json, which says how many experts there are
// and how many a token uses, and model.safetensors.index.json, which says what tensors the files must have
// together. Both are hostile. Thread: any. Memory: bounded by the limits below.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

inline constexpr std::uint64_t kIndexBytesMax = 64u << 20;
inline constexpr std::uint64_t kConfigBytesMax = 1u << 20;

struct SafetensorsIndex {
  struct Entry {
    std::string tensor;
    std::uint32_t file = 0;  // names of files are not kept: descriptors have none. Equal numbers, equal files
  };
  std::vector<Entry> entries;  // distinct tensors, by name
  std::uint32_t n_files = 0;
};

// Empty: JSON, but not an index.
[[nodiscard]] Result<std::optional<SafetensorsIndex>> read_safetensors_index(int fd);

struct HfConfig {
  std::string model_type;
  std::string name;                 // may be empty
  std::uint32_t n_experts = 0;      // of each MoE layer; 0: not said
  std::uint32_t n_expert_used = 0;  // top-k
};

[[nodiscard]] Result<HfConfig> read_hf_config(int fd);

}  // namespace moecached
