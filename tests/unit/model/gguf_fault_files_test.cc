// Every known kind of fault as a file, as fuzzers get them too: each refused, and for its own reason.
#include <map>

#include "tests/support/gguf_faults.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

// By the file's name. Empty: it is read, and its layout is sound.
const std::map<std::string, std::string> kSays = {
    {"key_count_beyond_the_file", "key count 18446744073709551615 of 14 bytes or more each"},
    {"key_count_one_more", "name of tensor 0 has"},
    {"key_count_one_less", "tensor 'tokenizer.ggml.add_bos_token' has 7 dimensions, the limit is 4"},
    {"tensor_count_beyond_the_file", "tensor count 636094623231363849 of 25 bytes or more each"},
    {"tensor_count_one_more", "name of tensor 6 is empty"},
    {"counts_swapped", "tensor count 9223372036854775808 of 25 bytes or more each"},
    {"block_count_none", ""},
    {"block_count_huge", ""},
    {"block_of_the_highest_number", ""},
    {"dimensions_none", "tensor 'blk.0.ffn_up_exps.weight' has ggml type 4"},
    {"dimensions_five", "tensor 'blk.0.ffn_up_exps.weight' has 5 dimensions, the limit is 4"},
    {"dimensions_huge", "tensor 'blk.0.ffn_up_exps.weight' has 2147483651 dimensions, the limit is 4"},
    {"dimension_zero", "tensor 'blk.0.ffn_up_exps.weight' has 0 elements in dimension 1"},
    {"dimension_negative",
     "tensor 'blk.0.ffn_up_exps.weight' has 9223372036854775808 elements in dimension 1"},
    {"product_wraps_to_zero",
     "tensor 'blk.0.ffn_up_exps.weight' has 4294967296 x 4294967296 x 2 x 1 elements, more than a file can "
     "hold"},
    {"product_wraps_to_a_small_one",
     "tensor 'blk.0.ffn_up_exps.weight' has 3 x 6148914691236517206 x 2 x 1 elements, more than a file can "
     "hold"},
    {"bytes_wrap",
     "tensor 'blk.0.ffn_up_exps.weight' has 1073741824 x 1073741824 x 2 x 1 elements, more than a file can "
     "hold"},
    {"type_removed", "tensor 'blk.0.ffn_up_exps.weight' has ggml type 4"},
    {"type_unknown", "tensor 'blk.0.ffn_up_exps.weight' has ggml type 200"},
    {"rows_of_half_a_block",
     "tensor 'blk.0.ffn_up_exps.weight' has rows of 4 elements, not a multiple of 256, the block of q4_K"},
    {"weights_of_four_dimensions",
     "tensor 'blk.0.ffn_up_exps.weight' has 2 elements in dimension 3, it must be 1: the experts are "
     "dimension 2"},
    {"alignment_0", "key 'general.alignment' is 0, it must be from 1 to 4294967295"},
    {"alignment_3", "key 'general.alignment' is 3, not a power of two"},
    {"alignment_2_31", "the data would start at byte 2147483648"},
    {"alignment_2_63", "key 'general.alignment' is 9223372036854775807, it must be from 1 to 4294967295"},
    {"alignment_negative", "key 'general.alignment' is -32, it must be from 1 to 4294967295"},
    {"alignment_is_text", "key 'general.alignment' is of type string, an integer is needed"},
    {"alignment_is_an_array", "key 'general.alignment' is of type array, an integer is needed"},
    {"offset_past_the_end", "tensor 'blk.0.ffn_up_exps.weight' has offset 1099511627776 and 128 bytes"},
    {"offset_wraps_into_the_file",
     "tensor 'blk.0.ffn_up_exps.weight' has offset 18446744073709551584 and 128 bytes"},
    {"offset_not_aligned",
     "tensor 'blk.0.ffn_up_exps.weight' has offset 33, not a multiple of the alignment 32"},
    {"end_wraps_into_the_file",
     "tensor 'blk.0.ffn_up_exps.weight' has offset 9223372036854775808 and 9223372036854775808 bytes"},
    {"size_past_the_end_by_a_row", "tensor 'blk.0.ffn_up_exps.weight' has offset 384 and 160 bytes"},
    {"tensors_overlap", "inside tensor 'token_embd.weight'"},
    {"tensors_at_one_place", "inside tensor 'blk.0.ffn_down_exps.weight'"},
    {"cut_in_the_header", "name of key 8 has 28 bytes"},
    {"cut_in_the_padding", "the data would start"},
    {"cut_in_the_last_tensor", "tensor 'blk.0.ffn_up_exps.weight' has offset 384 and 128 bytes"},
    {"key_name_length_wraps", "name of key 1 has 18446744073709551615 bytes"},
    {"key_name_empty", "name of key 1 is empty"},
    {"text_length_wraps", "string 0 of key 'general.name' has 18446744073709551608 bytes"},
    {"text_longer_than_the_file", "string 0 of key 'general.name' has 1048576 bytes"},
    {"text_in_an_array_length_wraps",
     "string 0 of key 'tokenizer.ggml.tokens' has 18446744073709551612 bytes"},
    {"tensor_name_length_wraps", "name of tensor 5 has 18446744073709551615 bytes"},
    {"tensor_name_too_long", "name of tensor 5 has 64 bytes, the limit is 63"},
    {"tensor_name_with_a_zero", "tensor 'blk.0.ffn_up_exps.weight?x' has a zero byte in its name"},
    {"value_type_unknown", "key 'general.name' has type 13, the highest known is 12"},
    {"value_type_negative", "key 'general.name' has type 4294967295, the highest known is 12"},
    {"array_of_arrays", "key 'tokenizer.ggml.token_type' is an array of arrays"},
    {"array_element_type_unknown",
     "the elements of key 'tokenizer.ggml.token_type' has type 13, the highest known is 12"},
    {"array_bytes_wrap_to_zero",
     "key 'tokenizer.ggml.token_type' has 4611686018427387904 elements of 4 bytes"},
    {"array_of_texts_wraps",
     "key 'tokenizer.ggml.tokens' has 2305843009213693953 strings of 8 bytes or more"},
    {"texts_taken_for_numbers", "name of key 7 has"},
    {"numbers_taken_for_texts", "string 0 of key 'tokenizer.ggml.token_type' has 4294967299 bytes"},
    {"array_taken_for_text", "string 0 of key 'tokenizer.ggml.tokens' has 17179869192 bytes"},
    {"text_taken_for_an_array", "key 'general.name' has"},
    {"architecture_is_an_array", "key 'general.architecture' must be a string of 1 to 1024 printable bytes"},
    {"key_twice", "key 'qwen3moe.expert_count' appears twice"},
    {"tensor_twice", "tensor 'blk.0.ffn_up_exps.weight' appears twice"},
    {"experts_none", "key 'qwen3moe.expert_count' is 0, it must be from 1 to 4096"},
    {"experts_more_than_the_tensors_have",
     "tensor 'blk.0.ffn_gate_exps.weight' has 2 experts, key 'qwen3moe.expert_count' says 3"},
    {"experts_huge", "key 'qwen3moe.expert_count' is 4294967295, it must be from 1 to 4096"},
    {"experts_used_none", "key 'qwen3moe.expert_used_count' is 0, it must be from 1 to 4096"},
    {"experts_used_more_than_there_are", "key 'qwen3moe.expert_used_count' is 3, block 0 has 2 experts"},
    {"experts_by_block_too_few", "key 'qwen3moe.expert_count' has 0 elements, none for block 0"},
    {"experts_by_block_negative", "key 'qwen3moe.expert_count' is -2 for block 0"},
    {"experts_as_text", "key 'qwen3moe.expert_count' is of type string, an integer is needed"},
    {"experts_differ_in_a_layer",
     "tensor 'blk.0.ffn_down_exps.weight' has 3 experts, tensor 'blk.0.ffn_gate_exps.weight' of the same "
     "block has 2"},
    {"shard_missing", "shard 1 of 2: key 'split.count' is 3, but 2 files were given"},
    {"shard_alone", "key 'split.count' is 3, but 1 file was given"},
    {"shards_swapped", "shard 2 of 3: key 'split.no' is 2, it must be 1 here"},
    {"shard_twice", "shard 3 of 3: key 'split.no' is 1, it must be 2 here"},
    {"shard_without_split_keys", "shard 2 of 3: key 'split.no' is missing"},
    {"shard_of_another_model", "shard 3 of 3: key 'split.tensors.count' is 21, the first shard says 16"},
    {"shard_number_negative", "shard 2 of 3: key 'split.no' is -1, it must be from 0 to 262144"},
    {"shard_count_huge",
     "shard 1 of 3: key 'split.count' is 9223372036854775807, it must be from 0 to 262144"},
    {"tensor_in_two_shards", "tensor 'blk.0.ffn_up_exps.weight' is in shard 2 and in shard 3"},
};

TEST(GgufFaultFiles, EachIsRefusedForItsReasonOrGivesASoundLayout) {
  const std::vector<GgufFaultFile> files = gguf_fault_files();
  EXPECT_EQ(files.size(), kSays.size());
  for (const GgufFaultFile& file : files) {
    ASSERT_TRUE(kSays.contains(file.name)) << file.name;
    const std::string& says = kSays.at(file.name);
    std::vector<GgufImage> images;
    std::vector<std::uint64_t> sizes;
    for (const std::vector<std::byte>& shard : file.shards) {
      images.emplace_back().bytes = shard;
      sizes.push_back(shard.size());
    }
    const Result<ModelLayout> layout = layout_of(images);
    if (says.empty()) {
      EXPECT_TRUE(layout) << file.name << ": " << layout.error().text;
      if (layout) {
        EXPECT_EQ(unsound(*layout, sizes, 4096), "") << file.name;
      }
    } else {
      EXPECT_FALSE(layout) << file.name;
      if (!layout) {
        EXPECT_THAT(layout.error().text, testing::HasSubstr(says)) << file.name;
      }
    }
  }
}

}  // namespace
}  // namespace moecached::test
