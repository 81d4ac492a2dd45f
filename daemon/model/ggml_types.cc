#include "daemon/model/ggml_types.h"

#include <algorithm>

namespace moecached {
namespace {

// Bytes are written as the sum of a block's fields: scales first, then packed values.
constexpr std::uint32_t kSuper = 256;  // elements of a K, IQ or TQ super-block
constexpr GgmlType kTypes[] = {
    {kGgmlF32, "f32", 1, 4, true},
    {1, "f16", 1, 2, true},
    {2, "q4_0", 32, 2 + 16, true},
    {3, "q4_1", 32, 2 + 2 + 16, true},
    {6, "q5_0", 32, 2 + 4 + 16, true},
    {7, "q5_1", 32, 2 + 2 + 4 + 16, true},
    {8, "q8_0", 32, 2 + 32, true},
    {9, "q8_1", 32, 2 + 2 + 32, true},
    {10, "q2_K", kSuper, 2 + 2 + 16 + 64, true},
    {11, "q3_K", kSuper, 2 + 12 + 32 + 64, true},
    {12, "q4_K", kSuper, 2 + 2 + 12 + 128, true},
    {13, "q5_K", kSuper, 2 + 2 + 12 + 32 + 128, true},
    {14, "q6_K", kSuper, 2 + 16 + 64 + 128, true},
    {15, "q8_K", kSuper, 4 + 256 + 32, true},
    {16, "iq2_xxs", kSuper, 2 + 64, true},
    {17, "iq2_xs", kSuper, 2 + 8 + 64, true},
    {18, "iq3_xxs", kSuper, 2 + 96, true},
    {19, "iq1_s", kSuper, 2 + 16 + 32, true},
    {20, "iq4_nl", 32, 2 + 16, true},
    {21, "iq3_s", kSuper, 2 + 4 + 8 + 32 + 64, true},
    {22, "iq2_s", kSuper, 2 + 8 + 8 + 64, true},
    {23, "iq4_xs", kSuper, 2 + 2 + 4 + 128, true},
    {24, "i8", 1, 1, false},
    {25, "i16", 1, 2, false},
    {26, "i32", 1, 4, false},
    {27, "i64", 1, 8, false},
    {28, "f64", 1, 8, true},
    {29, "iq1_m", kSuper, 8 + 16 + 32, true},
    {30, "bf16", 1, 2, true},
    {34, "tq1_0", kSuper, 2 + 4 + 48, true},
    {35, "tq2_0", kSuper, 2 + 64, true},
    {39, "mxfp4", 32, 1 + 16, true},
    {40, "nvfp4", 64, 4 + 32, true},
    {41, "q1_0", 128, 2 + 16, true},
    {42, "q2_0", 64, 2 + 16, true},
};

}  // namespace

std::span<const GgmlType> ggml_types() { return kTypes; }

const GgmlType* find_ggml_type(std::uint32_t id) {
  const auto* found = std::ranges::lower_bound(kTypes, id, {}, &GgmlType::id);
  return found != std::end(kTypes) && found->id == id ? found : nullptr;
}

}  // namespace moecached
