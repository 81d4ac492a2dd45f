#include "daemon/model/ggml_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace moecached {
namespace {

TEST(GgmlTypes, SizesAreThoseOfThePublishedFormats) {
  struct Known {
    const char* name;
    std::uint32_t elements;
    std::uint32_t bytes;
  };
  // Bits per weight as llama.cpp's documentation gives them, times the block: 4.5 bits x 256 = 144 bytes.
  const Known known[] = {{"f32", 1, 4},        {"f16", 1, 2},        {"bf16", 1, 2},     {"q4_0", 32, 18},
                         {"q4_1", 32, 20},     {"q5_0", 32, 22},     {"q5_1", 32, 24},   {"q8_0", 32, 34},
                         {"q2_K", 256, 84},    {"q3_K", 256, 110},   {"q4_K", 256, 144}, {"q5_K", 256, 176},
                         {"q6_K", 256, 210},   {"q8_K", 256, 292},   {"iq1_s", 256, 50}, {"iq1_m", 256, 56},
                         {"iq2_xxs", 256, 66}, {"iq2_xs", 256, 74},  {"iq2_s", 256, 82}, {"iq3_xxs", 256, 98},
                         {"iq3_s", 256, 110},  {"iq4_xs", 256, 136}, {"iq4_nl", 32, 18}, {"tq1_0", 256, 54},
                         {"tq2_0", 256, 66},   {"mxfp4", 32, 17},    {"nvfp4", 64, 36},  {"q8_1", 32, 36},
                         {"q1_0", 128, 18},    {"q2_0", 64, 18},     {"f64", 1, 8}};
  for (const Known& want : known) {
    const auto found = std::ranges::find_if(
        ggml_types(), [&](const GgmlType& t) { return t.name == std::string(want.name); });
    ASSERT_NE(found, ggml_types().end()) << want.name;
    EXPECT_EQ(found->block_elements, want.elements) << want.name;
    EXPECT_EQ(found->block_bytes, want.bytes) << want.name;
    EXPECT_TRUE(found->weights) << want.name;
  }
}

TEST(GgmlTypes, EveryTypeIsFoundByItsNumber) {
  for (const GgmlType& type : ggml_types()) EXPECT_EQ(find_ggml_type(type.id), &type) << type.name;
  EXPECT_TRUE(std::ranges::is_sorted(ggml_types(), std::ranges::less_equal{}, &GgmlType::id));
}

TEST(GgmlTypes, RemovedAndFutureNumbersAreNotFound) {
  for (const std::uint32_t id : {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u, 43u, 0x80000000u, 0xffffffffu}) {
    EXPECT_EQ(find_ggml_type(id), nullptr) << id;
  }
}

TEST(GgmlTypes, IntegerTypesHoldNoWeights) {
  for (const std::uint32_t id : {24u, 25u, 26u, 27u}) EXPECT_FALSE(find_ggml_type(id)->weights) << id;
}

}  // namespace
}  // namespace moecached
