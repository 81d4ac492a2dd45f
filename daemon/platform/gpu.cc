#include "daemon/platform/gpu.h"

namespace moecached {

std::string to_string(const GpuId& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < id.uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[id.uuid[i] >> 4];
    text += kDigits[id.uuid[i] & 15];
  }
  return text;
}

std::optional<GpuId> parse_gpu_id(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 16;
  };
  GpuId id;
  std::size_t n = 0;  // digits
  for (const char c : text) {
    const int value = digit(c);
    if (value < 16 && n < 2 * id.uuid.size()) {
      std::uint8_t& byte = id.uuid[n / 2];
      byte = static_cast<std::uint8_t>(byte << 4 | value);
      ++n;
    }
  }
  // What was skipped is what to_string() puts between the digits, or this is no UUID.
  if (to_string(id) != text) return std::nullopt;
  return id;
}

}  // namespace moecached
