#include "daemon/config/toml_file.h"

#include <fcntl.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "daemon/platform/fd.h"

namespace moecached {
namespace {

constexpr std::size_t kFileBytesMax = 1u << 20;

Result<std::string> read_whole(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return system_fault("open configuration " + path, errno);
  std::string text;
  while (text.size() <= kFileBytesMax) {
    char block[16384];
    const ssize_t got = ::read(fd.get(), block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_fault("read configuration " + path, errno);
    if (got == 0) return text;
    text.append(block, static_cast<std::size_t>(got));
  }
  return Fault{FaultCode::kInvalid, path + ": larger than a configuration can be (1MiB)"};
}

std::string place(const std::string& path, const toml::source_region& region) {
  return path + ":" + std::to_string(region.begin.line);
}

TomlValue flatten(std::string key, const toml::node& node) {
  TomlValue value{
      .key = std::move(key), .text = {}, .kind = TomlKind::kOther, .line = node.source().begin.line};
  if (const auto* text = node.as_string()) {
    value.kind = TomlKind::kText;
    value.text = text->get();
  } else if (const auto* integer = node.as_integer()) {
    value.kind = TomlKind::kInteger;
    value.text = std::to_string(integer->get());
  } else if (const auto* number = node.as_floating_point()) {
    value.kind = TomlKind::kNumber;
    value.text = std::to_string(number->get());
  } else if (const auto* boolean = node.as_boolean()) {
    value.kind = TomlKind::kBool;
    value.text = boolean->get() ? "true" : "false";
  }
  return value;
}

}  // namespace

Result<std::vector<TomlValue>> read_toml_file(const std::string& path) {
  Result<std::string> text = read_whole(path);
  if (!text) return std::move(text).error();
  std::vector<TomlValue> values;
  try {
    const toml::table file = toml::parse(*text, path);
    for (const auto& [section, node] : file) {
      const toml::table* table = node.as_table();
      if (table == nullptr) {
        // A key outside of every section: reported by its bare name, which no setting has.
        values.push_back(flatten(std::string(section.str()), node));
        continue;
      }
      if (table->empty()) {
        values.push_back({.key = std::string(section.str()),
                          .text = {},
                          .kind = TomlKind::kOther,
                          .line = section.source().begin.line});
      }
      for (const auto& [key, value] : *table) {
        values.push_back(flatten(std::string(section.str()) + "." + std::string(key.str()), value));
      }
    }
  } catch (const toml::parse_error& error) {
    return Fault{FaultCode::kInvalid, place(path, error.source()) + ": " + std::string(error.description())};
  }
  // toml++ sorts by name; people fix a file from the top.
  std::ranges::stable_sort(values, {}, &TomlValue::line);
  return values;
}

}  // namespace moecached
