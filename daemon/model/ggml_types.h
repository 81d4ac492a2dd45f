// Sizes of the element types that a GGUF tensor can have, as ggml 0.25.1 defines them. Sizes only: nothing
// here knows how a block is decoded. Numbers are the file format's, and never change meaning; removed ones
// are absent.
#pragma once

#include <cstdint>
#include <span>

namespace moecached {

struct GgmlType {
  std::uint32_t id = 0;              // as stored in the file
  const char* name = "";             // as llama.cpp prints it
  std::uint32_t block_elements = 0;  // a row is a whole number of blocks
  std::uint32_t block_bytes = 0;
  bool weights = false;  // a matrix can be stored in it; false for the integer types
};

inline constexpr std::uint32_t kGgmlF32 = 0;

[[nodiscard]] std::span<const GgmlType> ggml_types();            // ordered by id
[[nodiscard]] const GgmlType* find_ggml_type(std::uint32_t id);  // nullptr: unknown or removed

}  // namespace moecached
