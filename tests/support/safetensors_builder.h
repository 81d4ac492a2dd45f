// Writes small safetensors models for tests: files from names, dtypes and shapes, with the JSON files that
// lie beside them. Data is a function of tensor name and position (tensor_byte of gguf_builder.h). What a
// test asks for is written, sense or not: headers may be given as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/gguf_builder.h"

namespace moecached::test {

class SafetensorsBuilder {
 public:
  // Data follows the order of the calls, without gaps.
  SafetensorsBuilder& tensor(std::string name, std::string dtype, std::vector<std::uint64_t> shape);
  [[nodiscard]] std::vector<std::byte> build() const;
  [[nodiscard]] std::vector<std::string> names() const;

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<std::uint64_t> shape;
  };
  std::vector<Tensor> tensors_;
};

// A file with any text as its header, and zeros behind it.
[[nodiscard]] std::vector<std::byte> safetensors_with(std::string_view header, std::size_t data_bytes);
[[nodiscard]] std::vector<std::byte> bytes_of(std::string_view text);

enum class ExpertNames { kProjections, kMixtral, kFused };

struct HfSpec {
  ExpertNames names = ExpertNames::kProjections;
  std::uint32_t n_layers = 2, n_experts = 4, n_expert_used = 2;
  std::uint64_t hidden = 64, inner = 32;
  std::string dtype = "F32";
  std::uint32_t n_shards = 1;
};

struct HfModel {
  std::vector<SafetensorsBuilder> shards;
  std::string config, index;

  // Shards, config.json and, if there is more than one shard, the index: the files that a client passes.
  [[nodiscard]] std::vector<std::vector<std::byte>> files() const;
};

// Experts are dealt out to the shards one by one, between a norm, a router and a shared expert in each layer.
[[nodiscard]] HfModel make_hf(const HfSpec& spec);

}  // namespace moecached::test
