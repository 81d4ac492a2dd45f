// Reads the header of one GGUF file (versions 2 and 3, little-endian): its keys and where its tensors lie.
// The data is never touched. The file is hostile: every count, length, size and offset is checked against the
// file, and against the limits below, before it is believed or memory is taken for it. A refusal names the
// key or tensor, its value and the limit.
//
//   "GGUF" version n_tensors n_keys | keys: name type value | tensors: name n_dims ne[] type offset | padding
//   | data
//
// Thread: any. Memory: bounded by the limits below, tens of MiB for the worst file, well under one for usual
// ones.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/model/ggml_types.h"

namespace moecached {

inline constexpr std::uint64_t kGgufHeaderBytesMax =
    256u << 20;  // vocabularies of 250,000 words make 10 to 20 MiB
inline constexpr std::uint64_t kGgufKeysMax = 16384;
inline constexpr std::uint64_t kGgufKeyBytesMax = 1024;
inline constexpr std::uint64_t kGgufTensorsMax =
    262144;  // 64 layers of 256 experts with tensors of their own: 49152
inline constexpr std::uint64_t kGgufTensorNameBytesMax = 63;  // what ggml keeps
inline constexpr std::uint64_t kGgufKeptTextBytesMax = 1024;  // longer strings are skipped
inline constexpr std::uint64_t kGgufKeptElementsMax = 4096;   // longer arrays are skipped
inline constexpr std::uint64_t kGgufKeptBytesMax = 8u
                                                   << 20;  // of all values of one file; the rest is skipped

enum class GgufType : std::uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

[[nodiscard]] const char* gguf_type_name(GgufType type);

// Integers, short integer arrays and short strings are kept: all that a layout needs. Of anything else only
// the type is.
struct GgufValue {
  GgufType type = GgufType::kUint8;     // kArray: of `element`
  GgufType element = GgufType::kUint8;  // equal to type unless that is kArray
  std::uint64_t count = 1;              // elements in the file, kept or not
  bool kept = false;
  std::vector<std::int64_t> integers;  // values beyond int64 saturate: no limit lets them through
  std::string text;
};

struct GgufTensor {
  std::string name;
  const GgmlType* type = nullptr;  // static storage
  std::uint32_t n_dims = 0;
  std::array<std::uint64_t, 4> ne{1, 1, 1, 1};
  std::uint64_t offset = 0;  // bytes from the start of the file
  std::uint64_t bytes = 0;   // offset + bytes <= file_bytes
};

struct GgufFile {
  std::uint32_t version = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t alignment = 32;
  std::uint64_t data_offset = 0;
  std::map<std::string, GgufValue, std::less<>> values;
  std::vector<GgufTensor> tensors;  // as in the file; names are distinct, ranges do not overlap

  [[nodiscard]] const GgufValue* find(std::string_view key) const;
};

// fd: borrowed. kInvalid: not a GGUF, or one that contradicts itself; kLimit: beyond a limit above;
// kUnsupported: a version or byte order that is not read; kSystem, kChanged: the read failed.
[[nodiscard]] Result<GgufFile> read_gguf(int fd);

// The one integer of `key` if it lies in [low, high]; missing keys are kNotFound, anything else wrong
// kInvalid.
[[nodiscard]] Result<std::uint64_t> integer_value(const GgufFile& file, std::string_view key,
                                                  std::uint64_t low, std::uint64_t high);

}  // namespace moecached
