#include "tests/support/safetensors_builder.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>

namespace moecached::test {
namespace {

std::uint64_t bytes_of_element(std::string_view dtype) {
  if (dtype == "F32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  if (dtype == "U8" || dtype == "F8_E4M3") return 1;
  std::abort();
}

std::uint64_t product(const std::vector<std::uint64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies<>());
}

}  // namespace

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> safetensors_with(std::string_view header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  return file;
}

SafetensorsBuilder& SafetensorsBuilder::tensor(std::string name, std::string dtype,
                                               std::vector<std::uint64_t> shape) {
  tensors_.push_back({std::move(name), std::move(dtype), std::move(shape)});
  return *this;
}

std::vector<std::string> SafetensorsBuilder::names() const {
  std::vector<std::string> names;
  for (const Tensor& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

std::vector<std::byte> SafetensorsBuilder::build() const {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::uint64_t end = 0;
  for (const Tensor& tensor : tensors_) {
    std::string shape;
    for (const std::uint64_t n : tensor.shape) {
      if (!shape.empty()) shape += ',';
      shape += std::to_string(n);
    }
    const std::uint64_t begin = end;
    end += product(tensor.shape) * bytes_of_element(tensor.dtype);
    header += ",\"" + tensor.name + R"(":{"dtype":")" + tensor.dtype + R"(","shape":[)" + shape +
              R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::vector<std::byte> file = safetensors_with(header, end);
  std::span<std::byte> data = std::span(file).last(end);
  for (const Tensor& tensor : tensors_) {
    const std::uint64_t bytes = product(tensor.shape) * bytes_of_element(tensor.dtype);
    fill_tensor_bytes(tensor.name, 0, data.first(bytes));
    data = data.subspan(bytes);
  }
  return file;
}

std::vector<std::vector<std::byte>> HfModel::files() const {
  std::vector<std::vector<std::byte>> files;
  for (const SafetensorsBuilder& shard : shards) files.push_back(shard.build());
  files.push_back(bytes_of(config));
  if (shards.size() > 1) files.push_back(bytes_of(index));
  return files;
}

HfModel make_hf(const HfSpec& spec) {
  HfModel model;
  model.shards.resize(spec.n_shards);
  std::size_t dealt = 0;
  const auto deal = [&]() -> SafetensorsBuilder& { return model.shards[dealt++ % spec.n_shards]; };
  for (std::uint32_t l = 0; l < spec.n_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string block = layer + (spec.names == ExpertNames::kMixtral ? "block_sparse_moe." : "mlp.");
    const std::vector<std::uint64_t> up{spec.inner, spec.hidden}, down{spec.hidden, spec.inner};
    deal().tensor(layer + "input_layernorm.weight", spec.dtype, {spec.hidden});
    deal().tensor(block + "gate.weight", spec.dtype, {spec.n_experts, spec.hidden});
    deal().tensor(block + "shared_experts.up_proj.weight", spec.dtype, up);
    if (spec.names == ExpertNames::kFused) {
      deal().tensor(block + "experts.gate_up_proj", spec.dtype,
                    {spec.n_experts, 2 * spec.inner, spec.hidden});
      deal().tensor(block + "experts.down_proj", spec.dtype, {spec.n_experts, spec.hidden, spec.inner});
      continue;
    }
    const bool mixtral = spec.names == ExpertNames::kMixtral;
    for (std::uint32_t e = 0; e < spec.n_experts; ++e) {
      const std::string expert = block + "experts." + std::to_string(e) + ".";
      deal().tensor(expert + (mixtral ? "w1" : "gate_proj") + ".weight", spec.dtype, up);
      deal().tensor(expert + (mixtral ? "w2" : "down_proj") + ".weight", spec.dtype, down);
      deal().tensor(expert + (mixtral ? "w3" : "up_proj") + ".weight", spec.dtype, up);
    }
  }
  const std::string experts = spec.names == ExpertNames::kMixtral ? "num_local_experts" : "num_experts";
  model.config = R"({"model_type": "test_moe", ")" + experts + "\": " + std::to_string(spec.n_experts) +
                 ", \"num_experts_per_tok\": " + std::to_string(spec.n_expert_used) + "}";
  std::string map;
  for (std::size_t s = 0; s < model.shards.size(); ++s) {
    for (const std::string& name : model.shards[s].names()) {
      if (!map.empty()) map += ", ";
      map.append("\"").append(name).append("\": \"model-").append(std::to_string(s)).append("\"");
    }
  }
  model.index = R"({"metadata": {"total_size": 1}, "weight_map": {)" + map + "}}";
  return model;
}

}  // namespace moecached::test
