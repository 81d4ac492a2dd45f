#include "tests/support/gguf_faults.h"

#include <functional>
#include <limits>
#include <utility>

#include "tests/support/gguf_builder.h"

namespace moecached::test {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kBit63 = std::uint64_t{1} << 63;
constexpr const char* kUp = "blk.0.ffn_up_exps.weight";
constexpr const char* kDown = "blk.0.ffn_down_exps.weight";
constexpr const char* kCount = "qwen3moe.expert_count";
constexpr const char* kUsed = "qwen3moe.expert_used_count";
constexpr const char* kBlocks = "qwen3moe.block_count";
constexpr const char* kTokens = "key tokenizer.ggml.tokens ";
constexpr const char* kTypes = "key tokenizer.ggml.token_type ";
constexpr std::uint32_t kF64 = 28;

// Small, so that most of it is what a reader reads.
GgufBuilder small_model(std::uint32_t n_layers = 1) {
  return make_moe({.n_layers = n_layers,
                   .n_experts = 2,
                   .n_expert_used = 1,
                   .n_embd = 4,
                   .n_ff = 4,
                   .gate_type = 0,
                   .up_type = 0,
                   .down_type = 0});
}

std::string up(const char* field) { return std::string("tensor ").append(kUp).append(" ").append(field); }

class Files {
 public:
  void image(const char* name, const std::function<void(GgufImage&)>& change) {
    GgufImage image = small_model().build();
    change(image);
    files_.push_back({name, {std::move(image.bytes)}});
  }
  void u64(const char* name, const std::string& field, std::uint64_t value) {
    image(name, [&](GgufImage& image) { image.put_u64(field, value); });
  }
  void u32(const char* name, const std::string& field, std::uint32_t value) {
    image(name, [&](GgufImage& image) { image.put_u32(field, value); });
  }
  void model(const char* name, const std::function<void(GgufBuilder&)>& change) {
    GgufBuilder builder = small_model();
    change(builder);
    files_.push_back({name, {builder.build().bytes}});
  }
  void shards(const char* name, const std::function<void(std::vector<GgufBuilder>&)>& change) {
    std::vector<GgufBuilder> builders = small_model(3).split(3);
    change(builders);
    GgufFaultFile file{.name = name, .shards = {}};
    for (const GgufBuilder& builder : builders) file.shards.push_back(builder.build().bytes);
    files_.push_back(std::move(file));
  }
  [[nodiscard]] std::vector<GgufFaultFile> take() { return std::move(files_); }

 private:
  std::vector<GgufFaultFile> files_;
};

void counts(Files& files) {
  files.u64("key_count_beyond_the_file", "key count", kMax);
  files.u64("key_count_one_more", "key count", 10);
  files.u64("key_count_one_less", "key count", 8);
  files.u64("tensor_count_beyond_the_file", "tensor count", kMax / 29 + 1);
  files.u64("tensor_count_one_more", "tensor count", 7);
  files.image("counts_swapped", [](GgufImage& image) {
    image.put_u64("tensor count", kBit63);
    image.put_u64("key count", kBit63);
  });
  for (const auto& [name, value] : {std::pair{"block_count_none", 0u}, {"block_count_huge", ~0u}})
    files.model(name, [value = value](GgufBuilder& b) { b.remove_key(kBlocks).key_u32(kBlocks, value); });
  files.model("block_of_the_highest_number", [](GgufBuilder& b) {
    for (const char* part : {"gate", "up", "down"}) {
      const std::string name = std::string("ffn_").append(part).append("_exps.weight");
      b.remove_tensor("blk.0." + name).tensor("blk.4294967295." + name, 0, {4, 4, 2});
    }
  });
}

void shapes(Files& files) {
  files.u32("dimensions_none", up("dims"), 0);
  files.u32("dimensions_five", up("dims"), 5);
  files.u32("dimensions_huge", up("dims"), 0x80000003u);
  files.u64("dimension_zero", up("ne1"), 0);
  files.u64("dimension_negative", up("ne1"), kBit63);
  files.image("product_wraps_to_zero", [](GgufImage& image) {
    image.put_u64(up("ne0"), std::uint64_t{1} << 32);
    image.put_u64(up("ne1"), std::uint64_t{1} << 32);
  });
  files.image("product_wraps_to_a_small_one", [](GgufImage& image) {  // 3 * (2^64 + 2) / 3 * 2
    image.put_u64(up("ne0"), 3);
    image.put_u64(up("ne1"), 6148914691236517206u);
  });
  files.image("bytes_wrap", [](GgufImage& image) {
    image.put_u32(up("type"), kF64);
    image.put_u64(up("ne0"), std::uint64_t{1} << 30);
    image.put_u64(up("ne1"), std::uint64_t{1} << 30);
  });
  files.u32("type_removed", up("type"), 4);
  files.u32("type_unknown", up("type"), 200);
  files.image("rows_of_half_a_block", [](GgufImage& image) { image.put_u32(up("type"), 12); });
  files.model("weights_of_four_dimensions", [](GgufBuilder& b) {
    b.remove_tensor(kUp).tensor(kUp, 0, {4, 4, 2, 2});
  });
}

void places(Files& files) {
  for (const auto& [name, value] :
       {std::pair{"alignment_0", 0u}, {"alignment_3", 3u}, {"alignment_2_31", 1u << 31}})
    files.model(name, [value = value](GgufBuilder& b) { b.key_u32("general.alignment", value); });
  files.model("alignment_2_63", [](GgufBuilder& b) { b.key_u64("general.alignment", kBit63); });
  files.model("alignment_negative", [](GgufBuilder& b) { b.key_i32("general.alignment", -32); });
  files.model("alignment_is_text", [](GgufBuilder& b) { b.key_text("general.alignment", "32"); });
  files.model("alignment_is_an_array", [](GgufBuilder& b) { b.key_u32s("general.alignment", {32}); });
  files.u64("offset_past_the_end", up("offset"), std::uint64_t{1} << 40);
  files.u64("offset_wraps_into_the_file", up("offset"), kMax - 31);
  files.u64("offset_not_aligned", up("offset"), 33);
  files.image("end_wraps_into_the_file", [](GgufImage& image) {
    image.put_u32(up("type"), kF64);
    image.put_u64(up("ne0"), std::uint64_t{1} << 30);
    image.put_u64(up("ne1"), std::uint64_t{1} << 29);  // 2^63 bytes with two experts
    image.put_u64(up("offset"), kBit63);
  });
  files.u64("size_past_the_end_by_a_row", up("ne1"), 5);
  files.u64("tensors_overlap", up("offset"), 0);
  files.image("tensors_at_one_place", [](GgufImage& image) {
    image.put_u64(up("offset"), image.tensor_offsets.at(kDown) - image.data_offset);
  });
  files.image("cut_in_the_header", [](GgufImage& image) { image.bytes.resize(image.header_bytes / 2); });
  files.image("cut_in_the_padding", [](GgufImage& image) { image.bytes.resize(image.header_bytes); });
  files.image("cut_in_the_last_tensor", [](GgufImage& image) { image.bytes.resize(image.bytes.size() - 1); });
}

void values(Files& files) {
  files.u64("key_name_length_wraps", "key general.name length", kMax);
  files.u64("key_name_empty", "key general.name length", 0);
  files.u64("text_length_wraps", "key general.name value", kMax - 7);
  files.u64("text_longer_than_the_file", "key general.name value", 1u << 20);
  files.u64("text_in_an_array_length_wraps", std::string(kTokens) + "value", kMax - 3);
  files.u64("tensor_name_length_wraps", up("length"), kMax);
  files.u64("tensor_name_too_long", up("length"), 64);
  files.model("tensor_name_with_a_zero",
              [](GgufBuilder& b) { b.tensor(std::string(kUp) + '\0' + "x", 0, {4}); });
  files.u32("value_type_unknown", "key general.name type", 13);
  files.u32("value_type_negative", "key general.name type", ~0u);
  files.u32("array_of_arrays", std::string(kTypes) + "element type", 9);
  files.u32("array_element_type_unknown", std::string(kTypes) + "element type", 13);
  files.u64("array_bytes_wrap_to_zero", std::string(kTypes) + "count", std::uint64_t{1} << 62);
  files.u64("array_of_texts_wraps", std::string(kTokens) + "count", (std::uint64_t{1} << 61) + 1);
  files.u32("texts_taken_for_numbers", std::string(kTokens) + "element type", 10);
  files.u32("numbers_taken_for_texts", std::string(kTypes) + "element type", 8);
  files.u32("array_taken_for_text", std::string(kTokens) + "type", 8);
  files.u32("text_taken_for_an_array", "key general.name type", 9);
  files.model("architecture_is_an_array", [](GgufBuilder& b) {
    b.remove_key("general.architecture").key_texts("general.architecture", {"qwen3moe"});
  });
  files.model("key_twice", [](GgufBuilder& b) { b.key_u32(kCount, 2); });
  files.model("tensor_twice", [](GgufBuilder& b) { b.tensor(kUp, 0, {4, 4, 2}); });
}

void experts(Files& files) {
  const auto count = [&files](const char* name, const char* key, std::uint32_t value) {
    files.model(name, [key, value](GgufBuilder& b) { b.remove_key(key).key_u32(key, value); });
  };
  count("experts_none", kCount, 0);
  count("experts_more_than_the_tensors_have", kCount, 3);
  count("experts_huge", kCount, ~0u);
  count("experts_used_none", kUsed, 0);
  count("experts_used_more_than_there_are", kUsed, 3);
  files.model("experts_by_block_too_few", [](GgufBuilder& b) { b.remove_key(kCount).key_u32s(kCount, {}); });
  files.model("experts_by_block_negative",
              [](GgufBuilder& b) { b.remove_key(kCount).key_i32s(kCount, {-2}); });
  files.model("experts_as_text", [](GgufBuilder& b) { b.remove_key(kCount).key_text(kCount, "2"); });
  files.model("experts_differ_in_a_layer", [](GgufBuilder& b) {
    b.remove_tensor(kDown).tensor(kDown, 0, {4, 4, 3});
  });
}

void sets(Files& files) {
  files.shards("shard_missing", [](auto& shards) { shards.pop_back(); });
  files.shards("shard_alone", [](auto& shards) { shards.resize(1); });
  files.shards("shards_swapped", [](auto& shards) { std::swap(shards[1], shards[2]); });
  files.shards("shard_twice", [](auto& shards) { shards[2] = shards[1]; });
  files.shards("shard_without_split_keys", [](auto& shards) { shards[1] = small_model(3); });
  files.shards("shard_of_another_model", [](auto& shards) { shards[2] = small_model(4).split(3)[2]; });
  files.shards("shard_number_negative",
               [](auto& shards) { shards[1].remove_key("split.no").key_i32("split.no", -1); });
  files.shards("shard_count_huge",
               [](auto& shards) { shards[0].remove_key("split.count").key_u64("split.count", kMax); });
  files.shards("tensor_in_two_shards", [](auto& shards) {
    const std::string first = shards[1].build().tensor_offsets.begin()->first;
    shards[2].remove_tensor(shards[2].build().tensor_offsets.begin()->first).tensor(first, 0, {4});
  });
}

}  // namespace

std::vector<GgufFaultFile> gguf_fault_files() {
  Files files;
  counts(files);
  shapes(files);
  places(files);
  values(files);
  experts(files);
  sets(files);
  return files.take();
}

}  // namespace moecached::test
