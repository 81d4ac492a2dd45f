#include "daemon/model/hf_names.h"

#include <gtest/gtest.h>

#include <string>

namespace moecached {
namespace {

TEST(HfNames, OneTensorAnExpert) {
  struct Known {
    const char* name;
    moecached_part_kind kind;
    std::uint32_t block, expert;
  };
  for (const Known& known : {
           Known{"model.layers.3.mlp.experts.7.gate_proj.weight", MOECACHED_PART_GATE, 3, 7},
           Known{"model.layers.3.mlp.experts.0.up_proj.weight", MOECACHED_PART_UP, 3, 0},
           Known{"model.layers.60.mlp.experts.255.down_proj.weight", MOECACHED_PART_DOWN, 60, 255},
           Known{"model.layers.0.block_sparse_moe.experts.1.w1.weight", MOECACHED_PART_GATE, 0, 1},
           Known{"model.layers.0.block_sparse_moe.experts.1.w2.weight", MOECACHED_PART_DOWN, 0, 1},
           Known{"model.layers.0.block_sparse_moe.experts.1.w3.weight", MOECACHED_PART_UP, 0, 1},
           Known{"layers.2.feed_forward.experts.4.down_proj.bias", MOECACHED_PART_DOWN_BIAS, 2, 4},
       }) {
    const HfTensorName got = classify_hf_tensor(known.name);
    ASSERT_EQ(got.role, TensorRole::kPart) << known.name << ": " << got.reason;
    EXPECT_TRUE(got.single);
    EXPECT_EQ(got.kind, known.kind) << known.name;
    EXPECT_EQ(got.block, known.block) << known.name;
    EXPECT_EQ(got.expert, known.expert) << known.name;
    EXPECT_EQ(std::string(got.before_expert) + std::to_string(known.expert) + std::string(got.behind_expert),
              known.name);
  }
}

TEST(HfNames, OneTensorForAllExperts) {
  struct Known {
    const char* name;
    moecached_part_kind kind;
  };
  for (const Known& known : {
           Known{"model.layers.5.mlp.experts.gate_up_proj", MOECACHED_PART_GATE_UP},
           Known{"model.layers.5.mlp.experts.down_proj", MOECACHED_PART_DOWN},
           Known{"model.layers.5.mlp.experts.gate_up_proj_bias", MOECACHED_PART_GATE_UP_BIAS},
           Known{"model.layers.5.mlp.experts.down_proj_bias", MOECACHED_PART_DOWN_BIAS},
           Known{"language_model.model.layers.5.feed_forward.experts.gate_up_proj", MOECACHED_PART_GATE_UP},
       }) {
    const HfTensorName got = classify_hf_tensor(known.name);
    ASSERT_EQ(got.role, TensorRole::kPart) << known.name << ": " << got.reason;
    EXPECT_FALSE(got.single);
    EXPECT_EQ(got.kind, known.kind) << known.name;
    EXPECT_EQ(got.block, 5u);
  }
  EXPECT_EQ(classify_hf_tensor("language_model.model.layers.5.feed_forward.experts.down_proj").stack,
            "language_model.model.");
}

TEST(HfNames, WhatIsNotOfRoutedExperts) {
  for (const char* name :
       {"model.layers.3.mlp.gate.weight", "model.layers.3.mlp.shared_experts.up_proj.weight",
        "model.layers.3.mlp.shared_expert.up_proj.weight", "model.layers.3.mlp.up_proj.weight",
        "model.embed_tokens.weight", "experts.0.up_proj.weight", "model.norm.weight", "", "layers."})
    EXPECT_EQ(classify_hf_tensor(name).role, TensorRole::kOther) << name;
}

TEST(HfNames, WhatLooksLikeExpertsAndIsNotServed) {
  for (const char* name :
       {"model.layers.3.mlp.experts.7.gate_proj.weight_scale_inv",
        "model.layers.3.mlp.experts.gate_up_proj_blocks", "model.layers.3.mlp.experts.gate_up_proj_scales",
        "model.layers.3.mlp.experts.7.gate_proj.qweight", "model.layers.3.mlp.experts.07.gate_proj.weight",
        "model.layers.3.mlp.experts.-1.gate_proj.weight", "model.layers.03.mlp.experts.7.gate_proj.weight",
        "model.layers.x.mlp.experts.7.gate_proj.weight",
        "model.layers.4294967296.mlp.experts.7.up_proj.weight", "model.layers.3.mlp.experts.7.gate_proj",
        "model.layers.3.mlp.experts.4294967296.up_proj.weight", "model.layers.3.mlp.experts.",
        "layers.3.experts.7."}) {
    const HfTensorName got = classify_hf_tensor(name);
    EXPECT_EQ(got.role, TensorRole::kLeftOut) << name;
    EXPECT_FALSE(got.reason.empty()) << name;
  }
}

}  // namespace
}  // namespace moecached
