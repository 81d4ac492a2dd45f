#include "tests/support/gguf_builder.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/model/ggml_types.h"

namespace moecached::test {
namespace {

// Value types of the format.
constexpr std::uint32_t kUint16 = 2;
constexpr std::uint32_t kUint32 = 4;
constexpr std::uint32_t kInt32 = 5;
constexpr std::uint32_t kFloat32 = 6;
constexpr std::uint32_t kBool = 7;
constexpr std::uint32_t kString = 8;
constexpr std::uint32_t kArray = 9;
constexpr std::uint32_t kUint64 = 10;

constexpr std::string_view kSplitKeys = "split.";

void append_bytes(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) out.push_back(byte);
}

template <typename T>
void append(std::vector<std::byte>& out, const T& value) {
  append_bytes(out, std::as_bytes(std::span(&value, 1)));
}

void append_text(std::vector<std::byte>& out, std::string_view text) {
  append(out, static_cast<std::uint64_t>(text.size()));
  append_bytes(out, std::as_bytes(std::span(text)));
}

template <typename T>
std::vector<std::byte> bytes_of(const T& value) {
  std::vector<std::byte> out;
  append(out, value);
  return out;
}

template <typename T>
std::vector<std::byte> bytes_of_all(const std::vector<T>& values) {
  std::vector<std::byte> out;
  for (const T& value : values) append(out, value);
  return out;
}

std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

std::uint64_t hash_name(std::string_view name) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::uint64_t mix(std::uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::byte data_byte(std::uint64_t seed, std::uint64_t position) {
  const std::uint64_t word = mix(seed + (position / 8 + 1) * 0x9e3779b97f4a7c15u);
  return static_cast<std::byte>(word >> (position % 8 * 8));
}

template <typename T>
void put(GgufImage& image, const std::string& field, const T& value) {
  const std::size_t at = image.at(field);
  CHECK(at + sizeof value <= image.bytes.size());
  std::memcpy(image.bytes.data() + at, &value, sizeof value);
}

}  // namespace

std::size_t GgufImage::at(const std::string& field) const {
  const auto found = fields.find(field);
  CHECK(found != fields.end());
  return found->second;
}

void GgufImage::put_u8(const std::string& field, std::uint8_t value) { put(*this, field, value); }
void GgufImage::put_u32(const std::string& field, std::uint32_t value) { put(*this, field, value); }
void GgufImage::put_u64(const std::string& field, std::uint64_t value) { put(*this, field, value); }

GgufBuilder& GgufBuilder::key_raw(std::string key, std::uint32_t type, std::vector<std::byte> value) {
  keys_.push_back({.name = std::move(key), .type = type, .value = std::move(value)});
  return *this;
}

GgufBuilder& GgufBuilder::key_u16(std::string key, std::uint16_t value) {
  return key_raw(std::move(key), kUint16, bytes_of(value));
}
GgufBuilder& GgufBuilder::key_u32(std::string key, std::uint32_t value) {
  return key_raw(std::move(key), kUint32, bytes_of(value));
}
GgufBuilder& GgufBuilder::key_i32(std::string key, std::int32_t value) {
  return key_raw(std::move(key), kInt32, bytes_of(value));
}
GgufBuilder& GgufBuilder::key_u64(std::string key, std::uint64_t value) {
  return key_raw(std::move(key), kUint64, bytes_of(value));
}
GgufBuilder& GgufBuilder::key_f32(std::string key, float value) {
  return key_raw(std::move(key), kFloat32, bytes_of(value));
}
GgufBuilder& GgufBuilder::key_bool(std::string key, bool value) {
  return key_raw(std::move(key), kBool, bytes_of(static_cast<std::uint8_t>(value)));
}

GgufBuilder& GgufBuilder::key_text(std::string key, std::string_view value) {
  std::vector<std::byte> bytes;
  append_text(bytes, value);
  return key_raw(std::move(key), kString, std::move(bytes));
}

GgufBuilder& GgufBuilder::key_texts(std::string key, const std::vector<std::string>& values) {
  std::vector<std::byte> bytes;
  for (const std::string& value : values) append_text(bytes, value);
  keys_.push_back({std::move(key), kString, true, values.size(), std::move(bytes)});
  return *this;
}

GgufBuilder& GgufBuilder::key_u32s(std::string key, const std::vector<std::uint32_t>& values) {
  keys_.push_back({std::move(key), kUint32, true, values.size(), bytes_of_all(values)});
  return *this;
}

GgufBuilder& GgufBuilder::key_i32s(std::string key, const std::vector<std::int32_t>& values) {
  keys_.push_back({std::move(key), kInt32, true, values.size(), bytes_of_all(values)});
  return *this;
}

GgufBuilder& GgufBuilder::remove_key(std::string_view key) {
  CHECK(std::erase_if(keys_, [&](const Key& k) { return k.name == key; }) > 0);
  return *this;
}

GgufBuilder& GgufBuilder::tensor(std::string name, std::uint32_t ggml_type, std::vector<std::uint64_t> ne) {
  CHECK(ne.size() <= 4 && find_ggml_type(ggml_type) != nullptr);
  tensors_.push_back({std::move(name), ggml_type, std::move(ne)});
  return *this;
}

GgufBuilder& GgufBuilder::remove_tensor(std::string_view name) {
  CHECK(std::erase_if(tensors_, [&](const Tensor& t) { return t.name == name; }) > 0);
  return *this;
}

GgufBuilder& GgufBuilder::align_data(std::uint32_t alignment) {
  alignment_ = alignment;
  return *this;
}

GgufImage GgufBuilder::build() const {
  GgufImage image;
  std::vector<std::byte>& out = image.bytes;
  const auto mark = [&](std::string field) { image.fields.emplace(std::move(field), out.size()); };
  mark("magic");
  append(out, std::array{'G', 'G', 'U', 'F'});
  mark("version");
  append(out, version_);
  mark("tensor count");
  append(out, static_cast<std::uint64_t>(tensors_.size()));
  mark("key count");
  append(out, static_cast<std::uint64_t>(keys_.size()));
  for (const Key& key : keys_) {
    mark("key " + key.name + " length");
    append_text(out, key.name);
    mark("key " + key.name + " type");
    append(out, key.array ? kArray : key.type);
    if (key.array) {
      mark("key " + key.name + " element type");
      append(out, key.type);
      mark("key " + key.name + " count");
      append(out, key.count);
    }
    mark("key " + key.name + " value");
    append_bytes(out, key.value);
  }
  std::size_t offset = 0;
  std::vector<std::pair<std::size_t, std::size_t>> ranges;  // offset and bytes
  for (const Tensor& tensor : tensors_) {
    const GgmlType& type = *find_ggml_type(tensor.type);
    std::size_t elements = 1;
    mark("tensor " + tensor.name + " length");
    append_text(out, tensor.name);
    mark("tensor " + tensor.name + " dims");
    append(out, static_cast<std::uint32_t>(tensor.ne.size()));
    for (std::size_t d = 0; d < tensor.ne.size(); ++d) {
      mark("tensor " + tensor.name + " ne" + std::to_string(d));
      append(out, tensor.ne[d]);
      elements *= tensor.ne[d];
    }
    mark("tensor " + tensor.name + " type");
    append(out, tensor.type);
    mark("tensor " + tensor.name + " offset");
    append(out, static_cast<std::uint64_t>(offset));
    const std::size_t bytes = elements / type.block_elements * type.block_bytes;
    ranges.emplace_back(offset, bytes);
    offset = align_up(offset + bytes, alignment_);
  }
  image.header_bytes = out.size();
  image.data_offset = align_up(out.size(), alignment_);
  out.resize(image.data_offset + offset);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::size_t start = image.data_offset + ranges[i].first;
    image.tensor_offsets.emplace(tensors_[i].name, start);
    fill_tensor_bytes(tensors_[i].name, 0, std::span(out).subspan(start, ranges[i].second));
  }
  return image;
}

std::vector<GgufBuilder> GgufBuilder::split(std::uint16_t n) const {
  CHECK(n > 0);
  std::vector<GgufBuilder> shards;
  for (std::uint16_t i = 0; i < n; ++i) {
    GgufBuilder shard(version_);
    shard.alignment_ = alignment_;
    if (i == 0) shard.keys_ = keys_;
    std::erase_if(shard.keys_, [](const Key& key) { return key.name.starts_with(kSplitKeys); });
    shard.key_u16("split.no", i);
    shard.key_u16("split.count", n);
    shard.key_i32("split.tensors.count", static_cast<std::int32_t>(tensors_.size()));
    const std::size_t first = tensors_.size() * i / n;
    const std::size_t last = tensors_.size() * (i + 1u) / n;
    for (std::size_t t = first; t < last; ++t) shard.tensors_.push_back(tensors_[t]);
    shards.push_back(std::move(shard));
  }
  return shards;
}

std::byte tensor_byte(std::string_view name, std::uint64_t position) {
  return data_byte(hash_name(name), position);
}

void fill_tensor_bytes(std::string_view name, std::uint64_t position, std::span<std::byte> out) {
  const std::uint64_t seed = hash_name(name);
  for (std::byte& byte : out) byte = data_byte(seed, position++);
}

GgufBuilder make_moe(const MoeSpec& spec) {
  GgufBuilder builder(spec.version);
  const std::uint32_t n_blocks = spec.n_dense_layers + spec.n_layers;
  builder.key_text("general.architecture", spec.architecture)
      .key_text("general.name", spec.name)
      .key_u32(spec.architecture + ".block_count", n_blocks)
      .key_u32(spec.architecture + ".expert_count", spec.n_experts)
      .key_u32(spec.architecture + ".expert_used_count", spec.n_expert_used)
      .key_f32(spec.architecture + ".rope.freq_base", 10000.0f)
      .key_texts("tokenizer.ggml.tokens", {"<s>", "a", "", "word"})
      .key_i32s("tokenizer.ggml.token_type", {3, 1, 1, 1})
      .key_bool("tokenizer.ggml.add_bos_token", true);
  const std::uint64_t n_experts = spec.n_experts;
  builder.tensor("token_embd.weight", kGgmlF32, {spec.n_embd, 4});
  for (std::uint32_t block = 0; block < n_blocks; ++block) {
    const std::string prefix = "blk." + std::to_string(block) + ".";
    builder.tensor(prefix + "ffn_norm.weight", kGgmlF32, {spec.n_embd});
    if (block < spec.n_dense_layers) {
      builder.tensor(prefix + "ffn_up.weight", kGgmlF32, {spec.n_embd, spec.n_ff})
          .tensor(prefix + "ffn_down.weight", kGgmlF32, {spec.n_ff, spec.n_embd});
      continue;
    }
    builder.tensor(prefix + "ffn_gate_inp.weight", kGgmlF32, {spec.n_embd, n_experts});
    // Down comes first, as llama.cpp's converter writes it: order in the file is not order in a record.
    builder.tensor(prefix + "ffn_down_exps.weight", spec.down_type, {spec.n_ff, spec.n_embd, n_experts});
    if (spec.fused_gate_up) {
      builder.tensor(prefix + "ffn_gate_up_exps.weight", spec.up_type,
                     {spec.n_embd, 2 * spec.n_ff, n_experts});
    } else {
      builder.tensor(prefix + "ffn_gate_exps.weight", spec.gate_type, {spec.n_embd, spec.n_ff, n_experts})
          .tensor(prefix + "ffn_up_exps.weight", spec.up_type, {spec.n_embd, spec.n_ff, n_experts});
    }
    if (!spec.biases) continue;
    builder.tensor(prefix + "ffn_down_exps.bias", kGgmlF32, {spec.n_embd, n_experts});
    if (spec.fused_gate_up) {
      builder.tensor(prefix + "ffn_gate_up_exps.bias", kGgmlF32, {2 * spec.n_ff, n_experts});
    } else {
      builder.tensor(prefix + "ffn_gate_exps.bias", kGgmlF32, {spec.n_ff, n_experts})
          .tensor(prefix + "ffn_up_exps.bias", kGgmlF32, {spec.n_ff, n_experts});
    }
  }
  return builder;
}

UniqueFd memory_file(std::span<const std::byte> bytes) {
  UniqueFd fd(::memfd_create("moecached-test-gguf", MFD_CLOEXEC));
  CHECK(fd);
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::pwrite(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    CHECK(n > 0);
    done += static_cast<std::size_t>(n);
  }
  return fd;
}

void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  out.close();
  CHECK(out.good());
}

}  // namespace moecached::test
