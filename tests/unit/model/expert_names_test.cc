#include "daemon/model/expert_names.h"

#include <gtest/gtest.h>

#include <string>

namespace moecached {
namespace {

TEST(ExpertNames, EveryPartOfEveryBlockIsRecognised) {
  for (const std::uint32_t block : {0u, 9u, 10u, 61u, 4294967295u}) {
    for (int kind = MOECACHED_PART_GATE; kind <= MOECACHED_PART_GATE_UP_BIAS; ++kind) {
      const auto want = static_cast<moecached_part_kind>(kind);
      const std::string name = "blk." + std::to_string(block) + "." + std::string(part_suffix(want));
      const TensorName got = classify_tensor(name);
      EXPECT_EQ(got.role, TensorRole::kPart) << name;
      EXPECT_EQ(got.block, block) << name;
      EXPECT_EQ(got.kind, want) << name;
    }
  }
  EXPECT_EQ(part_suffix(MOECACHED_PART_GATE_UP), "ffn_gate_up_exps.weight");
  EXPECT_EQ(part_suffix(MOECACHED_PART_DOWN_BIAS), "ffn_down_exps.bias");
}

TEST(ExpertNames, DenseSharedAndRouterTensorsAreNotExperts) {
  for (const char* name : {"token_embd.weight", "blk.0.ffn_up.weight", "blk.0.ffn_gate_inp.weight",
                           "blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate_inp_shexp.weight",
                           "blk.0.exp_probs_b.bias", "blk.0.attn_q.bias", "output.weight", ""}) {
    EXPECT_EQ(classify_tensor(name).role, TensorRole::kOther) << name;
  }
}

TEST(ExpertNames, WhatLooksLikeAnExpertIsLeftOutWithItsOwnReason) {
  const std::pair<const char*, const char*> cases[] = {
      {"blk.0.ffn_gate.3.weight", "one tensor for each expert"},
      {"blk.11.ffn_down.127.weight", "one tensor for each expert"},
      {"blk.0.ffn_up_chexps.weight", "shared by groups"},
      {"blk.0.ffn_down_exps.scale", "one number for each expert"},
      {"blk.0.ffn_gate_exps.input_scale", "one number for each expert"},
      {"blk.0.ffn_norm_exps.weight", "a norm"},
      {"blk.0.ffn_gate_exps.weight.lora_a", "not one of"},
      {"blk.0.ffn_side_exps.weight", "not one of"},
      {"mtp.ffn_gate_exps.weight", "not in a numbered block"},
  };
  for (const auto& [name, reason] : cases) {
    const TensorName got = classify_tensor(name);
    EXPECT_EQ(got.role, TensorRole::kLeftOut) << name;
    EXPECT_NE(got.reason.find(reason), std::string_view::npos) << name << ": " << got.reason;
  }
}

TEST(ExpertNames, ABlockNumberHasOneSpelling) {
  for (const char* name :
       {"blk.00.ffn_up_exps.weight", "blk.+1.ffn_up_exps.weight", "blk.-1.ffn_up_exps.weight",
        "blk. 1.ffn_up_exps.weight", "blk.4294967296.ffn_up_exps.weight", "blk..ffn_up_exps.weight", "blk.1",
        "blk.1ffn_up_exps.weight"}) {
    EXPECT_NE(classify_tensor(name).role, TensorRole::kPart) << name;
  }
}

}  // namespace
}  // namespace moecached
