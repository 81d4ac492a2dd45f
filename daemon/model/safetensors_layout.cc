#include "daemon/model/safetensors_layout.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/text.h"
#include "daemon/model/finish_layout.h"
#include "daemon/model/hf_names.h"
#include "daemon/model/safetensors_set.h"

namespace moecached {
namespace {

constexpr std::size_t kKinds = MOECACHED_PART_GATE_UP_BIAS + 1;
constexpr std::string_view kKindNames[kKinds] = {"gate_proj",      "up_proj",          "down_proj",
                                                 "gate_up_proj",   "gate_proj bias",   "up_proj bias",
                                                 "down_proj bias", "gate_up_proj bias"};

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

std::string tensor_text(const SetTensor& tensor) { return "tensor " + in_quotes(tensor.tensor.name); }

// What a layer has of one kind: one tensor for all experts, or some for one expert each.
struct Sources {
  const SetTensor* fused = nullptr;
  std::vector<std::pair<std::uint32_t, const SetTensor*>> singles;
  std::string name;  // of the part

  [[nodiscard]] bool empty() const { return fused == nullptr && singles.empty(); }
  [[nodiscard]] const SetTensor& first() const { return fused != nullptr ? *fused : *singles.front().second; }
};
using BlockSources = std::array<Sources, kKinds>;  // by kind

class Builder {
 public:
  explicit Builder(const SafetensorsSet& set) : set_(set) {}

  Result<ModelLayout> build(std::uint32_t direct_alignment) {
    layout_.architecture = set_.config.model_type;
    layout_.name = set_.config.name;
    layout_.n_expert_used = set_.config.n_expert_used;
    layout_.n_files = set_.n_files;
    if (auto done = collect(); !done) return std::move(done).error();
    for (auto& [block, sources] : blocks_) drop_unusable(sources);
    std::erase_if(blocks_, [](const auto& entry) {
      return std::ranges::all_of(entry.second, [](const Sources& sources) { return sources.empty(); });
    });
    if (blocks_.empty()) return nothing_to_serve();
    if (blocks_.size() > MOECACHED_MAX_LAYERS) {
      return Fault{FaultCode::kLimit, std::to_string(blocks_.size()) + " layers have experts, the limit is " +
                                          std::to_string(static_cast<int>(MOECACHED_MAX_LAYERS))};
    }
    for (const auto& [block, sources] : blocks_) {
      if (auto done = add_layer(block, sources); !done) return std::move(done).error();
    }
    if (auto done = finish_layout(layout_, direct_alignment); !done) return std::move(done).error();
    return std::move(layout_);
  }

 private:
  void leave_out(const SetTensor& tensor, std::string_view reason) {
    layout_.left_out.push_back({printable(tensor.tensor.name), std::string(reason)});
  }
  void leave_out(Sources& sources, std::string_view reason) {
    if (sources.fused != nullptr) leave_out(*sources.fused, reason);
    for (const auto& [expert, tensor] : sources.singles) leave_out(*tensor, reason);
    sources = {};
  }

  // A file may hold more than one stack of layers, as those that predict further tokens: the largest is
  // served.
  std::string_view main_stack() const {
    std::map<std::string_view, std::size_t> counts;
    for (const SetTensor& tensor : set_.tensors) {
      const HfTensorName name = classify_hf_tensor(tensor.tensor.name);
      if (name.role == TensorRole::kPart) ++counts[name.stack];
    }
    const auto most = std::ranges::max_element(counts, {}, [](const auto& entry) { return entry.second; });
    return most == counts.end() ? std::string_view() : most->first;
  }

  Status collect() {
    const std::string_view stack = main_stack();
    for (const SetTensor& tensor : set_.tensors) {
      const HfTensorName name = classify_hf_tensor(tensor.tensor.name);
      if (name.role == TensorRole::kLeftOut) leave_out(tensor, name.reason);
      if (name.role != TensorRole::kPart) continue;
      if (name.stack != stack) {
        leave_out(tensor, "of another stack of layers than " + in_quotes(stack));
        continue;
      }
      Sources& sources = blocks_[name.block][name.kind];
      const bool other_way = name.single ? sources.fused != nullptr : !sources.empty();
      if (other_way) {
        return invalid(tensor_text(tensor) + " and " + tensor_text(sources.first()) +
                       " are the same part of the same experts");
      }
      if (name.single) {
        sources.singles.emplace_back(name.expert, &tensor);
        sources.name = std::string(name.before_expert) + "*" + std::string(name.behind_expert);
      } else {
        sources.fused = &tensor;
        sources.name = tensor.tensor.name;
      }
    }
    for (auto& [block, kinds] : blocks_) {
      for (Sources& sources : kinds)
        std::ranges::sort(sources.singles, {}, [](const auto& one) { return one.first; });
    }
    return ok();
  }

  // Leaves out what no slot can hold, then what makes no sense without it.
  void drop_unusable(BlockSources& kinds) {
    for (Sources& sources : kinds) {
      if (sources.empty()) continue;
      const SafetensorsTensor& tensor = sources.first().tensor;
      if (tensor.type == nullptr || !tensor.type->weights)
        leave_out(sources, std::string("of dtype ") + tensor.dtype + ", for which there are no slots");
      else if (sources.name.size() >= sizeof(moecached_shm_part::name))
        leave_out(sources, "its name is longer than " + std::to_string(sizeof(moecached_shm_part::name) - 1) +
                               " bytes");
    }
    const bool complete = !kinds[MOECACHED_PART_DOWN].empty() &&
                          (!kinds[MOECACHED_PART_UP].empty() || !kinds[MOECACHED_PART_GATE_UP].empty());
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (kinds[kind].empty()) continue;
      const auto bias = static_cast<moecached_part_kind>(kind);
      if (!complete)
        leave_out(kinds[kind], "its layer has no usable down_proj, or neither up_proj nor gate_up_proj");
      else if (is_bias(bias) && kinds[weight_of(bias)].empty())
        leave_out(kinds[kind], "a bias whose layer has no usable weight for it");
    }
  }

  Fault nothing_to_serve() const {
    std::string text =
        "no expert tensors that can be served (model_type " + in_quotes(layout_.architecture) + ")";
    if (!layout_.left_out.empty()) {
      text += "; " + std::to_string(layout_.left_out.size()) + " were left out, the first is " +
              in_quotes(layout_.left_out.front().tensor) + ": " + layout_.left_out.front().reason;
    }
    return Fault{FaultCode::kNotFound, std::move(text)};
  }

  Status add_layer(std::uint32_t block, const BlockSources& kinds) {
    LayerLayout layer;
    layer.block = block;
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (kinds[kind].empty()) continue;
      PartLayout part;
      part.kind = static_cast<moecached_part_kind>(kind);
      std::uint64_t n_experts = 0;
      if (auto done = describe_part(kinds[kind], block, part, n_experts); !done) return done;
      if (auto done = take_expert_count(kinds[kind], n_experts, layer); !done) return done;
      layer.parts.push_back(std::move(part));
    }
    layout_.layers.push_back(std::move(layer));
    return ok();
  }

  static Status describe_part(const Sources& sources, std::uint32_t block, PartLayout& part,
                              std::uint64_t& n_experts) {
    const SetTensor& first = sources.first();
    const SafetensorsTensor& tensor = first.tensor;
    const std::size_t n_dims = (is_bias(part.kind) ? 1u : 2u) + (sources.fused != nullptr ? 1u : 0u);
    if (tensor.n_dims != n_dims) {
      return invalid(tensor_text(first) + " has " + std::to_string(tensor.n_dims) + " dimensions, " +
                     std::to_string(n_dims) + " are needed");
    }
    if (tensor.bytes == 0) return invalid(tensor_text(first) + " is empty");
    n_experts = sources.fused != nullptr ? tensor.shape[0] : sources.singles.size();
    part.ggml_type = tensor.type->id;
    part.file = first.file;
    part.ne0 = tensor.shape[n_dims - 1];
    part.ne1 = is_bias(part.kind) ? 1 : tensor.shape[n_dims - 2];
    part.file_offset = tensor.offset;
    part.expert_bytes = sources.fused != nullptr ? tensor.bytes / n_experts : tensor.bytes;
    part.name = sources.name;
    return sources.fused != nullptr ? ok() : place_singles(sources, block, part);
  }

  static Status place_singles(const Sources& sources, std::uint32_t block, PartLayout& part) {
    const SetTensor& first = sources.first();
    for (const auto& [expert, tensor] : sources.singles) {
      if (expert != part.extents.size()) {
        if (expert < part.extents.size())
          return invalid(tensor_text(*tensor) + " is a second " + std::string(kKindNames[part.kind]) +
                         " of its expert");
        return invalid("layer " + std::to_string(block) + " has no " + std::string(kKindNames[part.kind]) +
                       " of expert " + std::to_string(part.extents.size()) + ", but one of expert " +
                       std::to_string(expert));
      }
      if (tensor->tensor.type != first.tensor.type || tensor->tensor.n_dims != first.tensor.n_dims ||
          tensor->tensor.shape != first.tensor.shape) {
        return invalid(tensor_text(*tensor) + " is of another shape or dtype than " + tensor_text(first));
      }
      part.extents.push_back({.file = tensor->file, .offset = tensor->tensor.offset});
    }
    return ok();
  }

  Status take_expert_count(const Sources& sources, std::uint64_t n_experts, LayerLayout& layer) {
    if (n_experts > MOECACHED_MAX_EXPERTS) {
      return Fault{FaultCode::kLimit, tensor_text(sources.first()) + " is one of " +
                                          std::to_string(n_experts) + " experts, the limit is " +
                                          std::to_string(static_cast<int>(MOECACHED_MAX_EXPERTS))};
    }
    // Where config.json says nothing, layers and parts must agree: the last experts of one may be in a file
    // that was not given.
    const bool is_first = layer.parts.empty() && layout_.layers.empty();
    const std::uint32_t expected = set_.config.n_experts != 0 ? set_.config.n_experts
                                   : is_first                 ? static_cast<std::uint32_t>(n_experts)
                                   : layer.parts.empty()      ? layout_.layers.front().n_experts
                                                              : layer.n_experts;
    if (n_experts != expected) {
      return invalid(tensor_text(sources.first()) + " and its like are of " + std::to_string(n_experts) +
                     " experts, " +
                     (set_.config.n_experts != 0 ? "config.json says " : "another part or layer has ") +
                     std::to_string(expected));
    }
    if (layout_.n_expert_used > expected) {
      return invalid("config.json says that " + std::to_string(layout_.n_expert_used) +
                     " experts are used, layer " + std::to_string(layer.block) + " has " +
                     std::to_string(expected));
    }
    layer.n_experts = expected;
    return ok();
  }

  const SafetensorsSet& set_;
  ModelLayout layout_;
  std::map<std::uint32_t, BlockSources> blocks_;
};

}  // namespace

bool has_safetensors(std::span<const int> fds) {
  return std::ranges::any_of(fds, [](int fd) {
    const auto is_one = safetensors_header_bytes(fd);
    return is_one && *is_one;
  });
}

Result<ModelLayout> read_safetensors_layout(std::span<const int> fds, std::uint32_t direct_alignment) {
  auto set = read_safetensors_set(fds);
  if (!set) return std::move(set).error();
  return Builder(*set).build(direct_alignment);
}

}  // namespace moecached
