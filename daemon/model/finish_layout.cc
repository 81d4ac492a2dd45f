#include "daemon/model/finish_layout.h"

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "daemon/base/text.h"
#include "daemon/model/checked_math.h"
#include "daemon/model/record_layout.h"

namespace moecached {
namespace {

Status add_total(const LayerLayout& layer, std::uint64_t& total) {
  for (const PartLayout& part : layer.parts) {
    std::uint64_t bytes = 0;
    if (!checked_multiply(part.expert_bytes, layer.n_experts, bytes) || !checked_add(total, bytes, total)) {
      return Fault{FaultCode::kInvalid,
                   "tensor " + in_quotes(part.name) + " brings the experts to 2^64 bytes or more"};
    }
  }
  return ok();
}

}  // namespace

Status finish_layout(ModelLayout& layout, std::uint32_t direct_alignment) {
  using ClassKey = std::vector<std::array<std::uint64_t, 3>>;  // kind, type, bytes
  std::map<ClassKey, std::uint32_t> classes;
  for (LayerLayout& layer : layout.layers) {
    auto stride = lay_out_record(layer.parts, direct_alignment);
    if (!stride) return std::move(stride).error();
    layer.slot_stride = *stride;
    ClassKey key;
    for (const PartLayout& part : layer.parts) key.push_back({part.kind, part.ggml_type, part.expert_bytes});
    layer.slot_class =
        classes.emplace(std::move(key), static_cast<std::uint32_t>(classes.size())).first->second;
    if (auto done = add_total(layer, layout.expert_bytes_total); !done) return done;
  }
  return ok();
}

}  // namespace moecached
