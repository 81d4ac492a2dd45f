// A parser with a planted fault, which a fuzzer that works finds within seconds: by what was covered it comes
// to the length, and only AddressSanitizer sees the read behind the end. Shows that the harness can fail.
#include <vector>

#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {

// Not inlined: the report must name it.
[[gnu::noinline]] std::uint8_t planted_fault(const std::vector<std::uint8_t>& entries, std::size_t index) {
  return entries[index];
}

}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::Input input({data, size});
  for (const char letter : {'M', 'O', 'E'}) {
    if (input.take<char>() != letter) return 0;
  }
  const std::vector<std::uint8_t> entries(8);
  const std::size_t n = input.take<std::uint8_t>();
  if (n > entries.size()) return 0;  // one too many comes through
  return moecached::fuzz::planted_fault(entries, n) == 255 ? 1 : 0;
}
