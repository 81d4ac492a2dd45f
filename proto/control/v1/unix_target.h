// The gRPC name of a Unix socket. gRPC reads "unix:PATH" as a URI on both sides: it decodes %41 to A and
// refuses a space, so paths are encoded first. Pure. Thread: any.
#pragma once

#include <string>
#include <string_view>

namespace moecached::control {

inline std::string unix_target(std::string_view path) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/";
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string target = "unix:";
  for (const char c : path) {
    if (kPlain.find(c) != std::string_view::npos) {
      target += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      target.append("%").append(1, kDigits[byte >> 4]).append(1, kDigits[byte & 15]);
    }
  }
  return target;
}

}  // namespace moecached::control
