#include "daemon/model/model_layout.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "daemon/base/text.h"
#include "daemon/model/checked_math.h"
#include "daemon/model/expert_names.h"
#include "daemon/model/finish_layout.h"
#include "daemon/model/safetensors_layout.h"
#include "daemon/model/shards.h"

namespace moecached {
namespace {

constexpr std::size_t kKinds = MOECACHED_PART_GATE_UP_BIAS + 1;
static_assert(kKinds == MOECACHED_MAX_PARTS);

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

std::string tensor_text(const ShardTensor& tensor) { return "tensor " + in_quotes(tensor.tensor.name); }

// A key with one value for all blocks, or an array with one for each block.
class PerBlock {
 public:
  static Result<PerBlock> read(const GgufFile& file, std::string key) {
    const GgufValue* value = file.find(key);
    if (value == nullptr)
      return invalid("key " + in_quotes(key) + " is missing; a model with expert tensors needs it");
    if (value->type != GgufType::kArray) {
      auto one = integer_value(file, key, 1, MOECACHED_MAX_EXPERTS);
      if (!one) return std::move(one).error();
      return PerBlock(std::move(key), {static_cast<std::int64_t>(*one)}, false);
    }
    if (!value->kept) {
      return invalid("key " + in_quotes(key) + " is an array of " + std::to_string(value->count) + " " +
                     gguf_type_name(value->element) + " elements; integers are needed, " +
                     std::to_string(kGgufKeptElementsMax) + " at most");
    }
    return PerBlock(std::move(key), value->integers, true);
  }

  Result<std::uint32_t> at(std::uint32_t block) const {
    if (per_block_ && block >= values_.size()) {
      return invalid("key " + in_quotes(key_) + " has " + std::to_string(values_.size()) +
                     " elements, none for block " + std::to_string(block));
    }
    const std::int64_t value = values_[per_block_ ? block : 0];
    if (value < 1 || value > MOECACHED_MAX_EXPERTS) {
      return invalid("key " + in_quotes(key_) + " is " + std::to_string(value) + " for block " +
                     std::to_string(block) + ", which has experts; it must be from 1 to " +
                     std::to_string(static_cast<int>(MOECACHED_MAX_EXPERTS)));
    }
    return static_cast<std::uint32_t>(value);
  }

  [[nodiscard]] const std::string& key() const { return key_; }

 private:
  PerBlock(std::string key, std::vector<std::int64_t> values, bool per_block)
      : key_(std::move(key)), values_(std::move(values)), per_block_(per_block) {}

  std::string key_;
  std::vector<std::int64_t> values_;
  bool per_block_;
};

using BlockParts = std::array<const ShardTensor*, kKinds>;  // by kind; null: none

class LayoutBuilder {
 public:
  LayoutBuilder(const ShardSet& shards, const LayoutOptions& options) : shards_(shards), options_(options) {}

  Result<ModelLayout> build() {
    if (auto done = describe(); !done) return std::move(done).error();
    collect_parts();
    for (auto& [block, parts] : blocks_) drop_unusable(parts);
    std::erase_if(blocks_, [](const auto& entry) { return entry.second == BlockParts{}; });
    if (blocks_.empty()) return nothing_to_serve();
    if (blocks_.size() > MOECACHED_MAX_LAYERS) {
      return Fault{FaultCode::kLimit, std::to_string(blocks_.size()) + " blocks have experts, the limit is " +
                                          std::to_string(static_cast<int>(MOECACHED_MAX_LAYERS))};
    }
    auto counts = PerBlock::read(shards_.first, layout_.architecture + ".expert_count");
    if (!counts) return std::move(counts).error();
    auto used = PerBlock::read(shards_.first, layout_.architecture + ".expert_used_count");
    if (!used) return std::move(used).error();
    for (const auto& [block, parts] : blocks_) {
      if (auto done = add_layer(block, parts, *counts, *used); !done) return std::move(done).error();
    }
    if (auto done = finish_layout(layout_, options_.direct_alignment); !done) return std::move(done).error();
    return std::move(layout_);
  }

 private:
  Status describe() {
    layout_.n_files = shards_.n_files;
    const GgufValue* architecture = shards_.first.find("general.architecture");
    if (architecture == nullptr) return invalid("key 'general.architecture' is missing");
    if (architecture->type != GgufType::kString || !architecture->kept || architecture->text.empty() ||
        printable(architecture->text) != architecture->text) {
      return invalid("key 'general.architecture' must be a string of 1 to " +
                     std::to_string(kGgufKeptTextBytesMax) + " printable bytes");
    }
    layout_.architecture = architecture->text;
    // For people only: a name of the wrong type is no reason to refuse a model.
    if (const GgufValue* name = shards_.first.find("general.name"); name != nullptr)
      layout_.name = for_people(name->text);
    return ok();
  }

  void leave_out(const ShardTensor& tensor, std::string reason) {
    layout_.left_out.push_back({printable(tensor.tensor.name), std::move(reason)});
  }

  void collect_parts() {
    for (const ShardTensor& tensor : shards_.tensors) {
      const TensorName name = classify_tensor(tensor.tensor.name);
      if (name.role == TensorRole::kPart) blocks_[name.block][name.kind] = &tensor;
      if (name.role == TensorRole::kLeftOut) leave_out(tensor, std::string(name.reason));
    }
  }

  // Leaves out what no slot can hold, then what makes no sense without it.
  void drop_unusable(BlockParts& parts) {
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (parts[kind] == nullptr) continue;
      const GgmlType& type = *parts[kind]->tensor.type;
      if (is_bias(static_cast<moecached_part_kind>(kind))) {
        if (type.id != kGgmlF32)
          drop(parts, kind, std::string("a bias of type ") + type.name + ", only f32 is served");
      } else if (!type.weights) {
        drop(parts, kind, std::string("of type ") + type.name + ", which holds no weights");
      }
    }
    std::string missing;
    if (parts[MOECACHED_PART_DOWN] == nullptr) missing = part_suffix(MOECACHED_PART_DOWN);
    if (parts[MOECACHED_PART_UP] == nullptr && parts[MOECACHED_PART_GATE_UP] == nullptr) {
      missing +=
          (missing.empty() ? "" : " and ") + std::string("ffn_up_exps.weight or ffn_gate_up_exps.weight");
    }
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (parts[kind] == nullptr) continue;
      if (!missing.empty()) {
        drop(parts, kind, "its block has no usable " + missing);
      } else if (const auto bias = static_cast<moecached_part_kind>(kind);
                 is_bias(bias) && parts[weight_of(bias)] == nullptr) {
        drop(parts, kind, "a bias whose block has no usable " + std::string(part_suffix(weight_of(bias))));
      }
    }
  }

  void drop(BlockParts& parts, std::size_t kind, std::string reason) {
    leave_out(*parts[kind], std::move(reason));
    parts[kind] = nullptr;
  }

  Fault nothing_to_serve() const {
    std::string text =
        "no expert tensors that can be served (architecture " + in_quotes(layout_.architecture) + ")";
    if (!layout_.left_out.empty()) {
      text += "; " + std::to_string(layout_.left_out.size()) + " were left out, the first is " +
              in_quotes(layout_.left_out.front().tensor) + ": " + layout_.left_out.front().reason;
    }
    return Fault{FaultCode::kNotFound, std::move(text)};
  }

  Status add_layer(std::uint32_t block, const BlockParts& parts, const PerBlock& counts,
                   const PerBlock& used) {
    LayerLayout layer;
    layer.block = block;
    const ShardTensor* first = nullptr;
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (parts[kind] == nullptr) continue;
      PartLayout part;
      part.kind = static_cast<moecached_part_kind>(kind);
      std::uint64_t n_experts = 0;
      if (auto done = describe_part(*parts[kind], parts, part, n_experts); !done) return done;
      if (first == nullptr) {
        if (auto done = take_expert_count(*parts[kind], n_experts, counts, used, layer); !done) return done;
        first = parts[kind];
      } else if (n_experts != layer.n_experts) {
        return invalid(tensor_text(*parts[kind]) + " has " + std::to_string(n_experts) + " experts, " +
                       tensor_text(*first) + " of the same block has " + std::to_string(layer.n_experts));
      }
      layer.parts.push_back(std::move(part));
    }
    layout_.layers.push_back(std::move(layer));
    return ok();
  }

  static Status describe_part(const ShardTensor& source, const BlockParts& parts, PartLayout& part,
                              std::uint64_t& n_experts) {
    const GgufTensor& tensor = source.tensor;
    const bool bias = is_bias(part.kind);
    const std::size_t expert_dimension = bias ? 1 : 2;
    for (std::size_t d = 0; d < tensor.ne.size(); ++d) {
      if (tensor.ne[d] == 0)
        return invalid(tensor_text(source) + " has 0 elements in dimension " + std::to_string(d));
      if (d > expert_dimension && tensor.ne[d] != 1) {
        return invalid(tensor_text(source) + " has " + std::to_string(tensor.ne[d]) +
                       " elements in dimension " + std::to_string(d) +
                       ", it must be 1: the experts are dimension " + std::to_string(expert_dimension));
      }
    }
    n_experts = tensor.ne[expert_dimension];
    part.ggml_type = tensor.type->id;
    part.file = source.file;
    part.ne0 = tensor.ne[0];
    part.ne1 = bias ? 1 : tensor.ne[1];
    part.file_offset = tensor.offset;
    // Exact: the reader checked that rows are whole blocks and that the product of all dimensions fits.
    part.expert_bytes = tensor.bytes / n_experts;
    part.name = tensor.name;
    if (!bias) return ok();
    const ShardTensor& weight = *parts[weight_of(part.kind)];
    if (weight.tensor.ne[1] == part.ne0) return ok();
    return invalid(tensor_text(source) + " has " + std::to_string(part.ne0) + " values for each expert, " +
                   tensor_text(weight) + " has " + std::to_string(weight.tensor.ne[1]) + " rows");
  }

  Status take_expert_count(const ShardTensor& tensor, std::uint64_t n_experts, const PerBlock& counts,
                           const PerBlock& used, LayerLayout& layer) {
    auto declared = counts.at(layer.block);
    if (!declared) return std::move(declared).error();
    if (n_experts != *declared) {
      return invalid(tensor_text(tensor) + " has " + std::to_string(n_experts) + " experts, key " +
                     in_quotes(counts.key()) + " says " + std::to_string(*declared));
    }
    layer.n_experts = *declared;
    auto top_k = used.at(layer.block);
    if (!top_k) return std::move(top_k).error();
    if (*top_k > layer.n_experts) {
      return invalid("key " + in_quotes(used.key()) + " is " + std::to_string(*top_k) + ", block " +
                     std::to_string(layer.block) + " has " + std::to_string(layer.n_experts) + " experts");
    }
    layout_.n_expert_used = std::max(layout_.n_expert_used, *top_k);
    return ok();
  }

  const ShardSet& shards_;
  const LayoutOptions& options_;
  ModelLayout layout_;
  std::map<std::uint32_t, BlockParts> blocks_;
};

}  // namespace

Result<ModelLayout> read_model_layout(std::span<const int> fds, const LayoutOptions& options) {
  if (options.direct_alignment != 0 && !is_power_of_two(options.direct_alignment)) {
    return invalid("direct-I/O alignment " + std::to_string(options.direct_alignment) +
                   " is not a power of two");
  }
  if (has_safetensors(fds)) return read_safetensors_layout(fds, options.direct_alignment);
  auto shards = read_shards(fds);
  if (!shards) return std::move(shards).error();
  return LayoutBuilder(*shards, options).build();
}

}  // namespace moecached
