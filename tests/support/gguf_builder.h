// Writes small GGUF files for tests: valid ones from keys and tensors, then broken ones by overwriting any
// field by name. Tensor data is a pure function of tensor name and position, so that a test can tell where a
// byte came from without keeping the file. Not a GGUF library: what a test asks for is written, sense or not.
//
//   GgufBuilder builder = make_moe({.architecture = "qwen3moe", .n_layers = 2});
//   GgufImage image = builder.build();
//   image.put_u64("tensor blk.0.ffn_up_exps.weight offset", 12345);
//   UniqueFd fd = memory_file(image.bytes);
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/platform/fd.h"

namespace moecached::test {

// A finished file. Fields are named
//   "magic" "version" "tensor count" "key count"
//   "key K length" "key K type" "key K element type" "key K count" "key K value"      (K: the key's name)
//   "tensor T length" "tensor T dims" "tensor T ne0".."tensor T ne3" "tensor T type" "tensor T offset"
// Of keys or tensors with equal names, the first one is meant.
struct GgufImage {
  std::vector<std::byte> bytes;
  std::map<std::string, std::size_t> fields;          // position in bytes
  std::map<std::string, std::size_t> tensor_offsets;  // of the data, from the start of the file
  std::size_t header_bytes = 0;  // up to the end of the last tensor's entry, without padding
  std::size_t data_offset = 0;

  [[nodiscard]] std::size_t at(const std::string& field) const;  // aborts on a name that is not there
  void put_u8(const std::string& field, std::uint8_t value);
  void put_u32(const std::string& field, std::uint32_t value);
  void put_u64(const std::string& field, std::uint64_t value);
};

class GgufBuilder {
 public:
  explicit GgufBuilder(std::uint32_t version = 3) : version_(version) {}

  GgufBuilder& key_u16(std::string key, std::uint16_t value);
  GgufBuilder& key_u32(std::string key, std::uint32_t value);
  GgufBuilder& key_i32(std::string key, std::int32_t value);
  GgufBuilder& key_u64(std::string key, std::uint64_t value);
  GgufBuilder& key_f32(std::string key, float value);
  GgufBuilder& key_bool(std::string key, bool value);
  GgufBuilder& key_text(std::string key, std::string_view value);
  GgufBuilder& key_texts(std::string key, const std::vector<std::string>& values);
  GgufBuilder& key_u32s(std::string key, const std::vector<std::uint32_t>& values);
  GgufBuilder& key_i32s(std::string key, const std::vector<std::int32_t>& values);
  // Any type number and any bytes as the value.
  GgufBuilder& key_raw(std::string key, std::uint32_t type, std::vector<std::byte> value);
  GgufBuilder& remove_key(std::string_view key);

  // Data follows the order of the calls, each at the next multiple of the alignment. ggml_type must be a
  // known one.
  GgufBuilder& tensor(std::string name, std::uint32_t ggml_type, std::vector<std::uint64_t> ne);
  GgufBuilder& remove_tensor(std::string_view name);

  // Where data lies; does not write general.alignment, which is an ordinary key (u32). A power of two.
  GgufBuilder& align_data(std::uint32_t alignment);

  [[nodiscard]] GgufImage build() const;

  // n files as gguf-split makes them: all keys in the first, split.* in each, tensors dealt out in order.
  [[nodiscard]] std::vector<GgufBuilder> split(std::uint16_t n) const;

 private:
  struct Key {
    std::string name;
    std::uint32_t type = 0;
    bool array = false;
    std::uint64_t count = 1;
    std::vector<std::byte> value;
  };
  struct Tensor {
    std::string name;
    std::uint32_t type = 0;
    std::vector<std::uint64_t> ne;
  };

  std::uint32_t version_;
  std::uint32_t alignment_ = 32;
  std::vector<Key> keys_;
  std::vector<Tensor> tensors_;
};

// Byte `position` of the data of tensor `name`, as build() writes it.
[[nodiscard]] std::byte tensor_byte(std::string_view name, std::uint64_t position);
void fill_tensor_bytes(std::string_view name, std::uint64_t position, std::span<std::byte> out);

struct MoeSpec {
  std::string architecture = "qwen3moe";
  std::string name = "a test model";
  std::uint32_t version = 3;
  std::uint32_t n_layers = 2;        // with experts
  std::uint32_t n_dense_layers = 0;  // before them
  std::uint32_t n_experts = 4;
  std::uint32_t n_expert_used = 2;
  std::uint64_t n_embd = 64;    // a multiple of the types' blocks
  std::uint64_t n_ff = 32;      // the same
  std::uint32_t gate_type = 8;  // ggml types: q8_0
  std::uint32_t up_type = 8;
  std::uint32_t down_type = 8;
  bool fused_gate_up = false;  // one ffn_gate_up_exps of up_type instead of gate and up
  bool biases = false;
};

// Keys, an embedding, and for each layer a norm, a router and its experts (or a dense FFN).
[[nodiscard]] GgufBuilder make_moe(const MoeSpec& spec);

// The bytes as a memory file, readable from its start; aborts when the kernel refuses.
[[nodiscard]] UniqueFd memory_file(std::span<const std::byte> bytes);
void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

}  // namespace moecached::test
