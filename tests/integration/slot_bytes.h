// What a slot in RAM holds, against what the model's file was made with (gguf_builder.h).
#pragma once

#include <gtest/gtest.h>
#include <moecached/moecached.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/gguf_builder.h"

namespace moecached::test {

inline std::size_t wrong_bytes_in_slot(const moecached_model* model, std::uint32_t layer, std::int32_t id,
                                       std::int32_t slot) {
  moecached_layer_info info{};
  EXPECT_EQ(moecached_model_layer(model, layer, &info), MOECACHED_OK);
  std::size_t wrong = 0;
  std::vector<std::byte> expected;
  for (std::uint32_t p = 0; p < info.n_parts; ++p) {
    moecached_part_info part{};
    EXPECT_EQ(moecached_model_part(model, layer, p, &part), MOECACHED_OK);
    expected.resize(part.expert_bytes);
    test::fill_tensor_bytes(part.name, static_cast<std::uint64_t>(id) * part.expert_bytes, expected);
    const auto* at = static_cast<const std::byte*>(info.window) +
                     static_cast<std::uint64_t>(slot) * info.slot_stride + part.slot_offset;
    for (std::size_t i = 0; i < expected.size(); ++i) wrong += at[i] != expected[i] ? 1 : 0;
  }
  return wrong;
}

}  // namespace moecached::test
