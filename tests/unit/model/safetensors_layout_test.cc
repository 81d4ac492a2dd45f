// Whole models as safetensors: what is found, and what does not belong together.
#include "daemon/model/safetensors_layout.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "daemon/model/safetensors.h"
#include "tests/support/safetensors_builder.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

struct Files {
  explicit Files(const std::vector<std::vector<std::byte>>& contents) {
    for (const auto& content : contents) {
      files.push_back(memory_file(content));
      fds.push_back(files.back().get());
      bytes.push_back(content.size());
    }
  }
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  std::vector<std::uint64_t> bytes;
};

Result<ModelLayout> layout_of_files(const std::vector<std::vector<std::byte>>& contents,
                                    std::uint32_t alignment = 4096) {
  const Files files(contents);
  auto layout = read_model_layout(files.fds, {.direct_alignment = alignment});
  if (layout) {
    EXPECT_EQ(unsound(*layout, files.bytes, alignment), "");
  }
  return layout;
}

// Every expert's bytes lie where the layout says: read from the files, compared with what they were made of.
void expect_right_places(const HfModel& model, const ModelLayout& layout) {
  const auto contents = model.files();
  for (const LayerLayout& layer : layout.layers) {
    for (const PartLayout& part : layer.parts) {
      for (std::uint32_t e = 0; e < layer.n_experts; ++e) {
        std::string name = part.name;
        if (const auto star = name.find('*'); star != std::string::npos)
          name.replace(star, 1, std::to_string(e));
        std::vector<std::byte> expected(part.expert_bytes);
        fill_tensor_bytes(name, part.extents.empty() ? e * part.expert_bytes : 0, expected);
        const PartExtent extent = part.extent(e);
        const auto* at = contents[extent.file].data() + extent.offset;
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), at)) << name << " expert " << e;
      }
    }
  }
}

TEST(SafetensorsLayout, ExpertsThatAreTensorsOfTheirOwn) {
  const HfModel model = make_hf({.n_layers = 3, .n_experts = 5});
  auto layout = layout_of_files(model.files());
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->architecture, "test_moe");
  EXPECT_EQ(layout->n_expert_used, 2u);
  EXPECT_EQ(layout->n_files, 2u);
  EXPECT_TRUE(layout->left_out.empty());
  ASSERT_EQ(layout->layers.size(), 3u);
  const LayerLayout& layer = layout->layers[1];
  EXPECT_EQ(layer.block, 1u);
  EXPECT_EQ(layer.n_experts, 5u);
  ASSERT_EQ(layer.parts.size(), 3u);
  EXPECT_EQ(layer.parts[0].name, "model.layers.1.mlp.experts.*.gate_proj.weight");
  EXPECT_EQ(layer.parts[2].kind, MOECACHED_PART_DOWN);
  EXPECT_EQ(layer.parts[2].ne0, 32u);
  EXPECT_EQ(layer.parts[2].ne1, 64u);
  EXPECT_EQ(layer.parts[2].expert_bytes, 64u * 32 * 4);
  EXPECT_EQ(layer.slot_class, layout->layers[0].slot_class);
  expect_right_places(model, *layout);
}

TEST(SafetensorsLayout, MixtralsNamesAndShards) {
  const HfModel model = make_hf(
      {.names = ExpertNames::kMixtral, .n_layers = 2, .n_experts = 8, .dtype = "BF16", .n_shards = 3});
  auto layout = layout_of_files(model.files());
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->n_files, 5u);
  ASSERT_EQ(layout->layers.size(), 2u);
  EXPECT_EQ(layout->layers[0].parts[0].name, "model.layers.0.block_sparse_moe.experts.*.w1.weight");
  EXPECT_EQ(layout->layers[0].parts[0].ggml_type, 30u);
  expect_right_places(model, *layout);
}

TEST(SafetensorsLayout, FusedTensorsAreDense) {
  const HfModel model = make_hf({.names = ExpertNames::kFused, .dtype = "F16", .n_shards = 2});
  auto layout = layout_of_files(model.files());
  ASSERT_TRUE(layout) << layout.error().text;
  const LayerLayout& layer = layout->layers[1];
  ASSERT_EQ(layer.parts.size(), 2u);
  EXPECT_EQ(layer.parts[0].kind, MOECACHED_PART_DOWN);
  EXPECT_EQ(layer.parts[1].kind, MOECACHED_PART_GATE_UP);
  EXPECT_EQ(layer.parts[1].ne1, 64u);
  EXPECT_TRUE(layer.parts[1].extents.empty());
  expect_right_places(model, *layout);
}

TEST(SafetensorsLayout, FilesComeInAnyOrder) {
  const HfModel model = make_hf({.n_shards = 2});
  auto files = model.files();
  std::ranges::reverse(files);
  auto layout = layout_of_files(files);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->n_files, 4u);
}

TEST(SafetensorsLayout, ExpertsOfAnotherPhaseAreCopied) {
  // The norms of 256 bytes between them move what is behind: two shards, two phases.
  const HfModel model = make_hf({.n_layers = 2, .hidden = 64, .inner = 64, .n_shards = 2});
  auto layout = layout_of_files(model.files());
  ASSERT_TRUE(layout) << layout.error().text;
  std::size_t direct = 0, copied = 0;
  for (const LayerLayout& layer : layout->layers) {
    for (const PartLayout& part : layer.parts) {
      EXPECT_TRUE(part.direct);
      for (const PartExtent& extent : part.extents) ++(extent.direct ? direct : copied);
    }
  }
  EXPECT_GT(direct, 0u);
  EXPECT_GT(copied, 0u);
}

TEST(SafetensorsLayout, BiasesQuantizedTensorsAndOtherStacks) {
  HfModel model = make_hf({.names = ExpertNames::kFused, .n_layers = 1});
  model.shards[0]
      .tensor("model.layers.0.mlp.experts.gate_up_proj_bias", "F32", {4, 64})
      .tensor("model.layers.0.mlp.experts.down_proj_bias", "BF16", {4, 64})
      .tensor("mtp.layers.0.mlp.experts.down_proj", "F32", {4, 64, 32})
      .tensor("model.layers.1.mlp.experts.down_proj", "F8_E4M3", {4, 64, 32})
      .tensor("model.layers.1.mlp.experts.gate_up_proj", "F8_E4M3", {4, 64, 64})
      .tensor("model.layers.2.mlp.experts.down_proj", "F32", {4, 64, 32})
      .tensor("model.layers.0.mlp.experts.down_proj_scales", "U8", {4});
  auto layout = layout_of_files(model.files());
  ASSERT_TRUE(layout) << layout.error().text;
  ASSERT_EQ(layout->layers.size(), 1u);
  ASSERT_EQ(layout->layers[0].parts.size(), 4u);
  EXPECT_EQ(layout->layers[0].parts[2].kind, MOECACHED_PART_DOWN_BIAS);
  EXPECT_EQ(layout->layers[0].parts[2].ne0, 64u);
  EXPECT_EQ(layout->layers[0].parts[2].expert_bytes, 128u);
  EXPECT_EQ(layout->left_out.size(), 5u);
}

TEST(SafetensorsLayout, WhatIsMissingIsNamed) {
  const auto refused = [](HfModel model, FaultCode code, std::initializer_list<std::string_view> words) {
    expect_fault(layout_of_files(model.files()), code, words);
  };
  // Experts are dealt out: without the second shard some are missing, and the index knows.
  HfModel model = make_hf({.n_shards = 2});
  const HfModel whole = model;
  model.shards.pop_back();
  expect_fault(layout_of_files({whole.shards[0].build(), bytes_of(whole.config)}), FaultCode::kInvalid,
               {"has no", "expert"});
  expect_fault(layout_of_files({whole.shards[0].build(), bytes_of(whole.config), bytes_of(whole.index)}),
               FaultCode::kInvalid, {"names 2 files", "1 safetensors"});
  expect_fault(layout_of_files({whole.shards[0].build(), whole.shards[1].build()}), FaultCode::kInvalid,
               {"config.json"});
  expect_fault(layout_of_files({whole.shards[0].build(), whole.shards[0].build(), bytes_of(whole.config)}),
               FaultCode::kInvalid, {"two files"});
  expect_fault(layout_of_files({whole.shards[0].build(), bytes_of(whole.config), bytes_of(whole.config)}),
               FaultCode::kInvalid, {"file 3 of 3", "second config.json"});
  expect_fault(layout_of_files({whole.shards[0].build(), bytes_of(whole.index), bytes_of(whole.index)}),
               FaultCode::kInvalid, {"second index"});

  HfModel last = make_hf({});
  last.config = R"({"model_type": "x", "num_experts": 5, "num_experts_per_tok": 2})";
  refused(last, FaultCode::kInvalid, {"4 experts", "config.json says 5"});
  last.config = R"({"model_type": "x", "num_experts_per_tok": 5})";
  refused(last, FaultCode::kInvalid, {"5 experts are used", "has 4"});

  HfModel uneven = make_hf({.n_layers = 1});
  uneven.config = R"({"model_type": "x", "num_experts_per_tok": 2})";
  uneven.shards[0].tensor("model.layers.0.mlp.experts.4.up_proj.weight", "F32", {32, 64});
  refused(uneven, FaultCode::kInvalid, {"5 experts", "another part or layer has 4"});

  HfModel dense;
  dense.shards.emplace_back().tensor("model.layers.0.mlp.up_proj.weight", "F32", {4, 4});
  dense.config = last.config;
  refused(dense, FaultCode::kNotFound, {"no expert tensors", "'x'"});
}

TEST(SafetensorsLayout, WhatContradictsItselfIsNamed) {
  const auto refused = [](const char* name, const char* dtype, std::vector<std::uint64_t> shape,
                          std::initializer_list<std::string_view> words,
                          ExpertNames names = ExpertNames::kProjections) {
    HfModel model = make_hf({.names = names, .n_layers = 1});
    model.config = R"({"model_type": "x", "num_experts_per_tok": 2})";
    model.shards[0].tensor(name, dtype, std::move(shape));
    expect_fault(layout_of_files(model.files()), FaultCode::kInvalid, words);
  };
  refused("model.layers.0.mlp.experts.4.up_proj.weight", "F32", {64, 32},
          {"experts.4.up_proj", "another shape"});
  refused("model.layers.0.mlp.experts.4.up_proj.weight", "F16", {32, 64},
          {"experts.4.up_proj", "another shape"});
  refused("model.layers.0.mlp.experts.5.up_proj.weight", "F32", {32, 64},
          {"has no up_proj of expert 4", "expert 5"});
  refused("model.layers.0.mlp.experts.2.w3.weight", "F32", {32, 64}, {"a second up_proj"});
  refused("model.layers.0.mlp.experts.up_proj", "F32", {4, 32, 64}, {"the same part"});
  refused("model.layers.0.mlp.experts.2.up_proj.weight", "F32", {32, 64}, {"twice"});
  refused("model.layers.0.mlp.experts.up_proj", "F32", {32, 64}, {"2 dimensions, 3"}, ExpertNames::kFused);
  refused("model.layers.0.mlp.experts.up_proj", "F32", {0, 32, 64}, {"empty"}, ExpertNames::kFused);
  refused("model.layers.0.mlp.experts.up_proj", "F32", {3, 32, 64}, {"4 experts", "has 3"},
          ExpertNames::kFused);

  HfModel many;
  many.shards.emplace_back()
      .tensor("layers.0.experts.down_proj", "F16", {4097, 2, 2})
      .tensor("layers.0.experts.up_proj", "F16", {4097, 2, 2});
  many.config = R"({"model_type": "x", "num_experts_per_tok": 2})";
  expect_fault(layout_of_files(many.files()), FaultCode::kLimit, {"4097", "4096"});
}

// By their first bytes alone: what lies behind is not read, and would be refused.
TEST(SafetensorsLayout, HeadersAreLimitedTogetherBeforeAnyIsRead) {
  const std::uint64_t length = kSafetensorsHeaderBytesMax;
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  for (std::uint64_t i = 0; i <= kSafetensorsHeadersBytesMax / length; ++i) {
    files.push_back(memory_file(safetensors_with("{", 0)));
    fds.push_back(files.back().get());
    ASSERT_EQ(::pwrite(fds.back(), &length, sizeof length, 0), static_cast<ssize_t>(sizeof length));
    ASSERT_EQ(::ftruncate(fds.back(), static_cast<off_t>(length + sizeof length)), 0);
  }
  expect_fault(read_model_layout(fds, {.direct_alignment = 0}), FaultCode::kLimit,
               {"headers of all files", std::to_string(9 * length), std::to_string(8 * length)});
  fds.pop_back();
  expect_fault(read_model_layout(fds, {.direct_alignment = 0}), FaultCode::kInvalid, {"file 1 of 8"});
}

TEST(SafetensorsLayout, AFileIsReadOnce) {
  const HfModel model = make_hf({});
  const Files files(model.files());
  std::vector<int> fds = files.fds;
  ASSERT_TRUE(read_model_layout(fds, {.direct_alignment = 0}));
  const UniqueFd again(::dup(fds.front()));
  fds.push_back(again.get());
  expect_fault(read_model_layout(fds, {.direct_alignment = 0}), FaultCode::kInvalid,
               {"file 3 of 3 is the same as file 1"});
}

TEST(SafetensorsLayout, TheIndexIsHeldAgainstTheFiles) {
  const HfModel model = make_hf({.n_shards = 2});
  const auto with_index = [&](std::string index) {
    HfModel other = model;
    other.index = std::move(index);
    return layout_of_files(other.files());
  };
  ASSERT_TRUE(with_index(model.index));
  std::string more = model.index;
  more.insert(more.size() - 2, R"(, "zebra": "model-0")");
  expect_fault(with_index(more), FaultCode::kInvalid, {"'zebra'", "in none of the files"});
  const std::string norm = R"("model.layers.0.input_layernorm.weight": "model-0", )";
  std::string fewer = model.index;
  ASSERT_NE(fewer.find(norm), std::string::npos);
  fewer.erase(fewer.find(norm), norm.size());
  expect_fault(with_index(fewer), FaultCode::kInvalid, {"input_layernorm", "is not in the index"});
  std::string elsewhere = model.index;
  elsewhere.replace(elsewhere.find(norm), norm.size(),
                    R"("model.layers.0.input_layernorm.weight": "model-1", )");
  expect_fault(with_index(elsewhere), FaultCode::kInvalid, {"another file than the index says"});
}

TEST(SafetensorsLayout, AnyByteOfTheHeaderChangedGivesAFaultOrALayoutInsideTheFile) {
  const HfModel model = make_hf({.n_layers = 1, .n_experts = 2, .hidden = 8, .inner = 8});
  std::vector<std::byte> bytes = model.shards[0].build();
  const Files files({bytes, bytes_of(model.config)});
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  std::size_t refused = 0, accepted = 0;
  for (std::size_t at = 0; at < header + sizeof header; ++at) {
    for (const std::byte now : {std::byte{0}, std::byte{0xff}, std::byte{'"'}, std::byte{'9'}, std::byte{'}'},
                                bytes[at] ^ std::byte{1}}) {
      ASSERT_EQ(::pwrite(files.fds[0], &now, 1, static_cast<off_t>(at)), 1);
      auto layout = read_model_layout(files.fds, {});
      ++(layout ? accepted : refused);
      const std::string wrong = layout ? unsound(*layout, files.bytes, 4096) : "";
      ASSERT_EQ(wrong, "") << "byte " << at;
      ASSERT_TRUE(layout || !layout.error().text.empty()) << "byte " << at;
    }
    ASSERT_EQ(::pwrite(files.fds[0], &bytes[at], 1, static_cast<off_t>(at)), 1);
  }
  EXPECT_GT(refused, header);
  EXPECT_GT(accepted, 0u) << "names of tensors that are not of experts may be anything";
}

}  // namespace
}  // namespace moecached::test
