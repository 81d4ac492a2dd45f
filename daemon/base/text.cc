#include "daemon/base/text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moecached {
namespace {

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// RFC 3629: shortest forms only, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const std::size_t following = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || text.size() - i < following) return false;
    std::uint32_t point = lead & (0x3fu >> following);
    for (const char c : text.substr(i, following)) {
      const auto byte = static_cast<unsigned char>(c);
      if ((byte & 0xc0u) != 0x80u) return false;
      point = point << 6 | (byte & 0x3fu);
    }
    i += following;
    if (following == 2 && (point < 0x800 || (point >= 0xd800 && point <= 0xdfff))) return false;
    if (following == 3 && (point < 0x10000 || point > 0x10ffff)) return false;
  }
  return true;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out(text);
  std::ranges::replace_if(
      out, [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 90;
  std::string out = printable(text.substr(0, kShown));
  out.insert(out.begin(), '\'');
  out += text.size() > kShown ? "...'" : "'";
  return out;
}

std::string for_people(std::string_view text) {
  if (!is_utf8(text)) return printable(text);
  std::string out(text);
  std::ranges::replace_if(out, is_control, '?');
  return out;
}

}  // namespace moecached
