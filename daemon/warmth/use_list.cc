#include "daemon/warmth/use_list.h"

#include <algorithm>
#include <map>

namespace moecached {

UseList sum_of(std::span<const UseList> lists) {
  std::map<std::uint32_t, std::vector<std::uint64_t>> sums;
  for (const UseList& list : lists) {
    for (const LayerUses& layer : list.layers) {
      std::vector<std::uint64_t>& sum = sums[layer.block];
      if (sum.size() < layer.counts.size()) sum.resize(layer.counts.size());
      for (std::size_t e = 0; e < layer.counts.size(); ++e)
        sum[e] = std::min(sum[e] + layer.counts[e], kUseCountMax);
    }
  }
  UseList out;
  for (auto& [block, counts] : sums) out.layers.push_back({block, std::move(counts)});
  return out;
}

Result<UseList> fit_to(const UseList& list, std::span<const BlockShape> shapes) {
  UseList out{.label = list.label, .layers = {}};
  std::size_t n_found = 0;
  for (const BlockShape& shape : shapes) {
    LayerUses layer{.block = shape.block, .counts = {}};
    const auto found = std::ranges::find(list.layers, shape.block, &LayerUses::block);
    if (found != list.layers.end()) {
      ++n_found;
      layer.counts = found->counts;
    }
    if (layer.counts.size() > shape.n_experts) {
      return Fault{FaultCode::kInvalid, "layer " + std::to_string(shape.block) + " has " +
                                            std::to_string(layer.counts.size()) + " counts, the model " +
                                            std::to_string(shape.n_experts) +
                                            " experts there: another model's"};
    }
    layer.counts.resize(shape.n_experts);
    out.layers.push_back(std::move(layer));
  }
  if (n_found == 0)
    return Fault{FaultCode::kInvalid, "none of its layers is one of this model's: another model's"};
  return out;
}

std::string file_label(const std::string& label) {
  std::string out = label.substr(0, kUseLabelBytesMax);
  for (char& c : out) {
    if (c < 0x21 || c > 0x7e || c == ',' || c == '"' || c == '#') c = '_';
  }
  return out;
}

}  // namespace moecached
