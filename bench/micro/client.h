// What programs that measure the client have in common.
#pragma once

#include <errno.h>
#include <moecached/moecached.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace moecached::bench {

// Ends the program with the client's sentence.
inline void check(moecached_status status) {
  if (status == MOECACHED_OK) return;
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, moecached_last_error());
  std::exit(1);
}

// "GPU-01234567-89ab-..." as nvidia-smi -L prints it.
inline bool parse_uuid(std::string_view text, std::uint8_t (&uuid)[16]) {
  if (!text.starts_with("GPU-")) return false;
  std::size_t digits = 0;
  for (const char c : text.substr(4)) {
    if (c == '-') continue;
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0 || digits == 32) return false;
    uuid[digits / 2] = static_cast<std::uint8_t>(uuid[digits / 2] << 4 | value);
    ++digits;
  }
  return digits == 32;
}

}  // namespace moecached::bench
