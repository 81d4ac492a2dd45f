// What a slot in RAM holds, against what the model's files were made with (gguf_builder.h,
// safetensors_builder.h).
#pragma once

#include <gtest/gtest.h>
#include <moecached/moecached.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/support/gguf_builder.h"

namespace moecached::test {

// One part of one expert, as the file was made.
inline void fill_expert(const moecached_part_info& part, std::uint32_t expert, std::span<std::byte> out) {
  std::string name = part.name;
  const auto star = name.find('*');  // a tensor for each expert
  if (star != std::string::npos) name.replace(star, 1, std::to_string(expert));
  fill_tensor_bytes(name, star == std::string::npos ? expert * part.expert_bytes : 0, out);
}

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
    fill_expert(part, static_cast<std::uint32_t>(id), expected);
    const auto* at = static_cast<const std::byte*>(info.window) +
                     static_cast<std::uint64_t>(slot) * info.slot_stride + part.slot_offset;
    for (std::size_t i = 0; i < expected.size(); ++i) wrong += at[i] != expected[i] ? 1 : 0;
  }
  return wrong;
}

}  // namespace moecached::test
