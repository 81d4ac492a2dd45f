// How often each expert of a model was used, by whom (a label of sessions, or whatever a file calls it): what
// hot lists, imatrix files and CSV counts have in common. Not a policy, and no order of time. Thread: any.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

struct LayerUses {
  std::uint32_t block = 0;            // N of "blk.N."
  std::vector<std::uint64_t> counts;  // by expert
};

struct UseList {
  std::string label;
  std::vector<LayerUses> layers;  // ordered by block, each once
};

// A layer of the model that a list is for.
struct BlockShape {
  std::uint32_t block = 0;
  std::uint32_t n_experts = 0;
  bool operator==(const BlockShape&) const = default;
};

inline constexpr std::uint32_t kUseBlocksMax = 4096;   // as MOECACHED_MAX_LAYERS
inline constexpr std::uint32_t kUseExpertsMax = 4096;  // of a layer, as MOECACHED_MAX_EXPERTS
inline constexpr std::size_t kUseLabelsMax = 16;       // lists of one file
inline constexpr std::size_t kUseLabelBytesMax = 64;
inline constexpr std::uint64_t kUseCountMax = 1ull << 51;  // exact in a double; sums of a layer do not wrap

// Counts of the same layers added up. Lists of several workloads become one.
[[nodiscard]] UseList sum_of(std::span<const UseList> lists);
// The same, checked against a model: in the order of its layers, each with a count for every expert, 0 where
// the list has none. kInvalid: the list has more experts than a layer, or none of its layers.
[[nodiscard]] Result<UseList> fit_to(const UseList& list, std::span<const BlockShape> shapes);
// A label as it stands in a file: printable, without commas and quotes, cut to kUseLabelBytesMax.
[[nodiscard]] std::string file_label(const std::string& label);

}  // namespace moecached
