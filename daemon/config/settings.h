// The table of everything that can be set: one line each, read by the TOML file, the flags, --help and
// --print-config, so that none of them can differ from the others. Thread: any.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/config/toml_file.h"

namespace moecached {

enum class SettingKind : std::uint8_t {
  kText,     // TOML string
  kInteger,  // TOML integer
  kSize,     // TOML string or integer
  kBool,
};

struct Setting {
  std::string_view key;    // "pool.bytes"; the flag is --pool-bytes
  std::string_view alias;  // one more flag without dashes, or empty
  SettingKind kind;
  std::string_view value_name;  // in --help
  std::string_view help;
  // kInvalid: the text says what is allowed, and not which setting it was.
  Status (*set)(Config& config, std::string_view text);
  std::string (*get)(const Config& config);  // as text; set() takes it
};

[[nodiscard]] std::span<const Setting> settings();
[[nodiscard]] const Setting* find_setting(std::string_view key);
[[nodiscard]] bool is_section(std::string_view name);
[[nodiscard]] std::string flag_of(const Setting& setting);  // "--pool-bytes"
// The key closest to a misspelt one, by edit distance.
[[nodiscard]] std::string_view nearest_key(std::string_view key);
// Whether a TOML value of this kind may stand for the setting; if not, what it must be: "must be true or
// false".
[[nodiscard]] Status check_kind(const Setting& setting, TomlKind kind);

}  // namespace moecached
