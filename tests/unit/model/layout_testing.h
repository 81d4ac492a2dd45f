// What the tests of daemon/model share: reading images, and looking at what came out.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/model/gguf.h"
#include "daemon/model/model_layout.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/layout_check.h"

namespace moecached::test {

inline Result<GgufFile> read_image(const GgufImage& image) {
  const UniqueFd fd = memory_file(image.bytes);
  return read_gguf(fd.get());
}

inline Result<ModelLayout> layout_of(std::span<const GgufImage> images,
                                     std::uint32_t direct_alignment = 4096) {
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  for (const GgufImage& image : images) {
    files.push_back(memory_file(image.bytes));
    fds.push_back(files.back().get());
  }
  return read_model_layout(fds, {.direct_alignment = direct_alignment});
}

inline Result<ModelLayout> layout_of(const GgufImage& image, std::uint32_t direct_alignment = 4096) {
  return layout_of(std::span(&image, 1), direct_alignment);
}

inline Result<ModelLayout> layout_of(const GgufBuilder& builder, std::uint32_t direct_alignment = 4096) {
  return layout_of(builder.build(), direct_alignment);
}

template <typename T>
void expect_fault(const Result<T>& result, FaultCode code, std::initializer_list<std::string_view> words) {
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(static_cast<int>(result.error().code), static_cast<int>(code)) << result.error().text;
  for (const std::string_view word : words)
    EXPECT_THAT(result.error().text, testing::HasSubstr(std::string(word)));
}

const PartLayout* find_part(const ModelLayout& layout, std::string_view name);

}  // namespace moecached::test
