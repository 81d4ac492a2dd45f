// Layouts of good models.
#include "daemon/model/model_layout.h"

#include <set>

#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

std::string check(const GgufImage& image, std::uint32_t alignment = 4096) {
  auto layout = layout_of(image, alignment);
  if (!layout) return layout.error().text;
  const std::uint64_t bytes = image.bytes.size();
  return unsound(*layout, std::span(&bytes, 1), alignment);
}

TEST(ModelLayout, DescribesTheModel) {
  const GgufImage image = make_moe({.n_layers = 3, .n_experts = 8, .n_expert_used = 3}).build();
  auto layout = layout_of(image);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->architecture, "qwen3moe");
  EXPECT_EQ(layout->name, "a test model");
  EXPECT_EQ(layout->n_expert_used, 3u);
  EXPECT_EQ(layout->n_files, 1u);
  ASSERT_EQ(layout->layers.size(), 3u);
  EXPECT_EQ(layout->layers[2].n_experts, 8u);
  EXPECT_EQ(layout->expert_bytes_total, 3u * 8 * 3 * (64 * 32 / 32 * 34));
  EXPECT_TRUE(layout->left_out.empty());
  EXPECT_EQ(check(image), "");
}

TEST(ModelLayout, PartsAreOrderedByKindAndPointAtTheirBytes) {
  const GgufImage image = make_moe({.biases = true}).build();
  auto layout = layout_of(image);
  ASSERT_TRUE(layout) << layout.error().text;
  const LayerLayout& layer = layout->layers[1];
  const char* names[] = {"blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight",
                         "blk.1.ffn_down_exps.weight", "blk.1.ffn_gate_exps.bias",
                         "blk.1.ffn_up_exps.bias",     "blk.1.ffn_down_exps.bias"};
  ASSERT_EQ(layer.parts.size(), std::size(names));
  for (std::size_t p = 0; p < layer.parts.size(); ++p) {
    const PartLayout& part = layer.parts[p];
    EXPECT_EQ(part.name, names[p]);
    for (std::uint64_t expert = 0; expert < layer.n_experts; ++expert) {
      for (const std::uint64_t i : {std::uint64_t{0}, part.expert_bytes - 1}) {
        const std::uint64_t at = expert * part.expert_bytes + i;
        EXPECT_EQ(image.bytes[part.file_offset + at], tensor_byte(part.name, at)) << part.name;
      }
    }
  }
}

TEST(ModelLayout, ShapesAreThoseOfOneExpert) {
  auto layout = layout_of(make_moe({.n_embd = 128, .n_ff = 32, .biases = true}));
  ASSERT_TRUE(layout) << layout.error().text;
  const PartLayout* down = find_part(*layout, "blk.0.ffn_down_exps.weight");
  EXPECT_EQ(down->ne0, 32u);
  EXPECT_EQ(down->ne1, 128u);
  EXPECT_EQ(down->expert_bytes, 128u * 34);
  const PartLayout* bias = find_part(*layout, "blk.0.ffn_down_exps.bias");
  EXPECT_EQ(bias->ne0, 128u);
  EXPECT_EQ(bias->ne1, 1u);
  EXPECT_EQ(bias->expert_bytes, 128u * 4);
  EXPECT_EQ(bias->ggml_type, kGgmlF32);
}

TEST(ModelLayout, DenseLayersDoNotAppear) {
  auto layout = layout_of(make_moe({.architecture = "deepseek2", .n_layers = 2, .n_dense_layers = 3}));
  ASSERT_TRUE(layout) << layout.error().text;
  ASSERT_EQ(layout->layers.size(), 2u);
  EXPECT_EQ(layout->layers[0].block, 3u);
  EXPECT_EQ(layout->layers[1].block, 4u);
}

TEST(ModelLayout, KeysAreTakenFromTheArchitectureTheFileNames) {
  for (const char* architecture :
       {"qwen2moe", "qwen3moe", "gpt-oss", "llama", "deepseek2", "glm4moe", "gemma4", "new"}) {
    auto layout = layout_of(make_moe({.architecture = architecture}));
    ASSERT_TRUE(layout) << layout.error().text;
    EXPECT_EQ(layout->architecture, architecture);
    EXPECT_EQ(layout->n_expert_used, 2u);
  }
}

TEST(ModelLayout, EveryTypeAndAlignmentGivesASoundLayout) {
  for (const GgmlType& type : ggml_types()) {
    if (!type.weights) continue;
    for (const std::uint64_t rows : {std::uint64_t{256}, std::uint64_t{1024}}) {
      for (const bool fused : {false, true}) {
        const GgufImage image = make_moe({.n_layers = 1,
                                          .n_experts = 3,
                                          .n_embd = rows,
                                          .n_ff = 256,
                                          .gate_type = type.id,
                                          .up_type = type.id,
                                          .down_type = type.id,
                                          .fused_gate_up = fused,
                                          .biases = true})
                                    .build();
        for (const std::uint32_t alignment : {0u, 1u, 32u, 512u, 4096u, 65536u}) {
          EXPECT_EQ(check(image, alignment), "") << type.name << " " << rows << " " << alignment;
        }
      }
    }
  }
}

TEST(ModelLayout, TheSoundnessCheckSeesOverlapsAndOverruns) {
  const GgufImage image = make_moe({}).build();
  const std::uint64_t bytes = image.bytes.size();
  auto layout = layout_of(image);
  ASSERT_TRUE(layout);
  ModelLayout overlap = *layout;
  overlap.layers[0].parts[1].slot_offset -= 64;
  EXPECT_EQ(unsound(overlap, std::span(&bytes, 1), 4096), "parts overlap in the record in block 0");
  ModelLayout overrun = *layout;
  overrun.layers[1].parts[0].file_offset += bytes;
  EXPECT_NE(unsound(overrun, std::span(&bytes, 1), 4096), "");
}

TEST(ModelLayout, LayersOfEqualPartsShareASlotClass) {
  GgufBuilder builder = make_moe({.n_layers = 4});
  builder.remove_tensor("blk.2.ffn_down_exps.weight").tensor("blk.2.ffn_down_exps.weight", 1, {32, 64, 4});
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  std::vector<std::uint32_t> classes;
  for (const LayerLayout& layer : layout->layers) classes.push_back(layer.slot_class);
  EXPECT_EQ(classes, (std::vector<std::uint32_t>{0, 0, 1, 0}));
}

TEST(ModelLayout, LayersWithAndWithoutBiasesAreTwoClasses) {
  GgufBuilder builder = make_moe({});
  builder.tensor("blk.1.ffn_down_exps.bias", 0, {64, 4});
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_NE(layout->layers[0].slot_class, layout->layers[1].slot_class);
}

TEST(ModelLayout, ExpertCountsMayDifferByLayerWhenTheKeysSaySo) {
  GgufBuilder builder = make_moe({.n_dense_layers = 1});
  builder.remove_key("qwen3moe.expert_count").key_u32s("qwen3moe.expert_count", {0, 4, 6});
  builder.remove_key("qwen3moe.expert_used_count").key_i32s("qwen3moe.expert_used_count", {0, 1, 3});
  for (const char* part : {"gate", "up", "down"}) {
    const std::string name = "blk.2.ffn_" + std::string(part) + "_exps.weight";
    builder.remove_tensor(name);
    builder.tensor(name, 8,
                   part == std::string("down") ? std::vector<std::uint64_t>{32, 64, 6}
                                               : std::vector<std::uint64_t>{64, 32, 6});
  }
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->layers[0].n_experts, 4u);
  EXPECT_EQ(layout->layers[1].n_experts, 6u);
  EXPECT_EQ(layout->layers[0].slot_class, layout->layers[1].slot_class);
  EXPECT_EQ(layout->n_expert_used, 3u);
}

TEST(ModelLayout, AnExpertNeedsNoGate) {
  GgufBuilder builder = make_moe({.n_layers = 1});
  builder.remove_tensor("blk.0.ffn_gate_exps.weight");
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->layers[0].parts.size(), 2u);
}

std::string reason_for(const ModelLayout& layout, std::string_view tensor) {
  for (const LeftOut& out : layout.left_out) {
    if (out.tensor == tensor) return out.reason;
  }
  return "not left out";
}

TEST(ModelLayout, WhatIsNotServedIsLeftOutWithItsReason) {
  GgufBuilder builder = make_moe({.n_layers = 4});
  builder.tensor("blk.0.ffn_gate.0.weight", 0, {4})
      .tensor("blk.0.ffn_up_chexps.weight", 0, {64, 32, 2})
      .tensor("blk.0.ffn_up_exps.scale", 0, {4})
      .tensor("blk.0.ffn_down_exps.bias", 1, {64, 4})  // f16
      .remove_tensor("blk.1.ffn_down_exps.weight")
      .remove_tensor("blk.2.ffn_up_exps.weight")
      .remove_tensor("blk.3.ffn_gate_exps.weight")
      .tensor("blk.3.ffn_gate_exps.bias", 0, {32, 4})
      .tensor("blk.9.ffn_up_exps.bias", 0, {32, 4});
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  ASSERT_EQ(layout->layers.size(), 2u);
  EXPECT_EQ(layout->layers[0].block, 0u);
  EXPECT_EQ(layout->layers[0].parts.size(), 3u);
  EXPECT_EQ(layout->layers[1].block, 3u);
  EXPECT_EQ(layout->layers[1].parts.size(), 2u);
  const std::pair<const char*, const char*> want[] = {
      {"blk.0.ffn_gate.0.weight", "one tensor for each expert"},
      {"blk.0.ffn_up_chexps.weight", "shared by groups"},
      {"blk.0.ffn_up_exps.scale", "one number for each expert"},
      {"blk.0.ffn_down_exps.bias", "a bias of type f16"},
      {"blk.1.ffn_gate_exps.weight", "no usable ffn_down_exps.weight"},
      {"blk.1.ffn_up_exps.weight", "no usable ffn_down_exps.weight"},
      {"blk.2.ffn_gate_exps.weight", "no usable ffn_up_exps.weight or ffn_gate_up_exps.weight"},
      {"blk.2.ffn_down_exps.weight", "no usable ffn_up_exps.weight or ffn_gate_up_exps.weight"},
      {"blk.3.ffn_gate_exps.bias", "no usable ffn_gate_exps.weight"},
      {"blk.9.ffn_up_exps.bias", "no usable ffn_down_exps.weight and ffn_up_exps.weight"},
  };
  for (const auto& [tensor, reason] : want)
    EXPECT_THAT(reason_for(*layout, tensor), testing::HasSubstr(reason)) << tensor;
  EXPECT_EQ(layout->left_out.size(), std::size(want));
}

TEST(ModelLayout, IntegerWeightsTakeTheirBlockWithThem) {
  GgufBuilder builder = make_moe({});
  builder.remove_tensor("blk.0.ffn_down_exps.weight").tensor("blk.0.ffn_down_exps.weight", 26, {32, 64, 4});
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  ASSERT_EQ(layout->layers.size(), 1u);
  EXPECT_EQ(layout->layers[0].block, 1u);
  EXPECT_THAT(reason_for(*layout, "blk.0.ffn_down_exps.weight"), testing::HasSubstr("type i32"));
  EXPECT_EQ(layout->left_out.size(), 3u);
}

TEST(ModelLayout, ADenseModelHasNoExperts) {
  auto layout = layout_of(make_moe({.architecture = "llama", .n_layers = 0, .n_dense_layers = 2}));
  expect_fault(layout, FaultCode::kNotFound, {"no expert tensors", "'llama'"});
}

TEST(ModelLayout, OldMixtralFilesAreNotFoundWithTheReason) {
  GgufBuilder builder = make_moe({.architecture = "llama", .n_layers = 0});
  for (int expert = 0; expert < 8; ++expert) {
    builder.tensor("blk.0.ffn_gate." + std::to_string(expert) + ".weight", 0, {4});
  }
  expect_fault(layout_of(builder), FaultCode::kNotFound,
               {"8 were left out", "blk.0.ffn_gate.0.weight", "convert"});
}

TEST(ModelLayout, HostileTextIsMadePrintable) {
  GgufBuilder builder = make_moe({.name = "evil\n\x1b[2J\xff"});
  builder.tensor("\x1b]exps\xff", 0, {4});
  auto layout = layout_of(builder);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->name, "evil??[2J?");
  EXPECT_EQ(layout->left_out.at(0).tensor, "?]exps?");
}

}  // namespace
}  // namespace moecached::test
