// A TOML file as a flat list of settings with their lines. It knows TOML and the two-level shape [section]
// key, not what the keys mean. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

enum class TomlKind : std::uint8_t { kText, kInteger, kNumber, kBool, kOther };

struct TomlValue {
  std::string key;   // "pool.bytes"
  std::string text;  // a string's content, or the number or boolean as written in decimal
  TomlKind kind = TomlKind::kOther;
  std::uint32_t line = 0;  // from 1
};

// kInvalid: no valid TOML ("x.toml:3: ..."), a section that is no table, or larger than a configuration can
// be.
[[nodiscard]] Result<std::vector<TomlValue>> read_toml_file(const std::string& path);

}  // namespace moecached
