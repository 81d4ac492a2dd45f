// Reads the header of one safetensors file: names, types and where its tensors lie. The data is never
// touched. The file is hostile: every length, shape and offset is checked against the file, and against the
// limits below, before it is believed or memory is taken for it. A refusal names the tensor, its value and
// the limit.
//
//   u64: bytes of the text | {"name": {"dtype": "BF16", "shape": [8, 64], "data_offsets": [0, 1024]}, ..} |
//   data
//
// As the format asks for, tensors cover the data without a gap or an overlap, so that no byte has two
// meanings or none. Thread: any. Memory: bounded by the limits below.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/model/ggml_types.h"

namespace moecached {

inline constexpr std::uint64_t kSafetensorsHeaderBytesMax = 32u << 20;
inline constexpr std::uint64_t kSafetensorsHeadersBytesMax = 256u << 20;  // of all files of a model
inline constexpr std::uint64_t kSafetensorsTensorsMax = 262144;           // of all files of a model
inline constexpr std::uint64_t kSafetensorsNameBytesMax = 255;
inline constexpr std::size_t kSafetensorsDimensionsMax = 8;

struct SafetensorsTensor {
  std::string name;
  const char* dtype = "";          // as the file says; static storage
  const GgmlType* type = nullptr;  // static storage; null: ggml has no such type
  std::size_t n_dims = 0;
  std::array<std::uint64_t, kSafetensorsDimensionsMax> shape{};  // the last dimension is the innermost
  std::uint64_t offset = 0;                                      // bytes from the start of the file
  std::uint64_t bytes = 0;
};

struct SafetensorsFile {
  std::uint64_t file_bytes = 0;
  std::vector<SafetensorsTensor> tensors;  // as in the file; names are distinct
};

// How long the header says it is, if the file begins as a safetensors file does; 0: it does not.
[[nodiscard]] Result<std::uint64_t> safetensors_header_bytes(int fd);

// fd: borrowed. kInvalid: not a safetensors file, or one that contradicts itself; kLimit: beyond a limit
// above, or header_bytes_max; kSystem, kChanged: the read failed.
[[nodiscard]] Result<SafetensorsFile> read_safetensors(
    int fd, std::uint64_t header_bytes_max = kSafetensorsHeaderBytesMax);

}  // namespace moecached
