#include "daemon/config/size.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace moecached {
namespace {

constexpr std::uint64_t kKib = 1024, kMib = kKib * 1024, kGib = kMib * 1024, kTib = kGib * 1024;
// A share is cut to whole pages, so that it can be printed and read back without a remainder of odd bytes.
constexpr std::uint64_t kShareGranule = 4096;

struct Unit {
  std::string_view suffix;
  std::uint64_t bytes;
};
constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"b", 1},
    Unit{"k", kKib},
    Unit{"kib", kKib},
    Unit{"m", kMib},
    Unit{"mib", kMib},
    Unit{"g", kGib},
    Unit{"gib", kGib},
    Unit{"t", kTib},
    Unit{"tib", kTib},
    Unit{"kb", 1'000},
    Unit{"mb", 1'000'000},
    Unit{"gb", 1'000'000'000},
    Unit{"tb", 1'000'000'000'000},
};

Fault not_a_size() {
  return {
      FaultCode::kInvalid,
      "is not a size: write bytes, a number with a unit (4GiB, 512MiB, 1.5GB) or a share of memory (25%)"};
}

}  // namespace

Result<std::uint64_t> parse_size(std::string_view text, std::uint64_t whole_bytes) {
  std::uint64_t whole = 0;
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [after_digits, digits_error] = std::from_chars(text.data(), end, whole);
  const char* after = after_digits;
  // Whole numbers stay integers: a double has 53 bits and would round large byte counts.
  const bool fraction = digits_error == std::errc() && after != end && *after == '.';
  if (digits_error == std::errc::result_out_of_range)
    return Fault{FaultCode::kInvalid, "is larger than 64 bits can hold"};
  if (digits_error != std::errc()) return not_a_size();
  if (fraction) {
    const auto [after_number, number_error] =
        std::from_chars(text.data(), end, number, std::chars_format::fixed);
    if (number_error != std::errc()) return not_a_size();
    after = after_number;
  }
  std::string suffix(after, end);
  suffix.erase(
      0, suffix.find_first_not_of(' ') == std::string::npos ? suffix.size() : suffix.find_first_not_of(' '));
  std::ranges::transform(suffix, suffix.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });

  if (suffix == "%") {
    const double percent = fraction ? number : static_cast<double>(whole);
    if (percent > 100) return Fault{FaultCode::kInvalid, "is more than 100%"};
    const long double share = static_cast<long double>(whole_bytes) * percent / 100;
    const auto bytes = static_cast<std::uint64_t>(share);
    return bytes >= kShareGranule ? bytes / kShareGranule * kShareGranule : bytes;
  }
  const auto unit = std::ranges::find(kUnits, suffix, &Unit::suffix);
  if (unit == kUnits.end()) return not_a_size();
  if (fraction) {
    const long double bytes = static_cast<long double>(number) * static_cast<long double>(unit->bytes);
    if (bytes >= 18446744073709551616.0L)
      return Fault{FaultCode::kInvalid, "is larger than 64 bits can hold"};
    return static_cast<std::uint64_t>(std::floor(bytes));
  }
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(whole, unit->bytes, &bytes))
    return Fault{FaultCode::kInvalid, "is larger than 64 bits can hold"};
  return bytes;
}

std::string format_size(std::uint64_t bytes) {
  constexpr std::array kExact = {Unit{"TiB", kTib}, Unit{"GiB", kGib}, Unit{"MiB", kMib}, Unit{"KiB", kKib}};
  for (const Unit& unit : kExact) {
    if (bytes >= unit.bytes && bytes % unit.bytes == 0)
      return std::to_string(bytes / unit.bytes).append(unit.suffix);
  }
  return std::to_string(bytes);
}

}  // namespace moecached
