#include "bench/replay/slot_choice.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

namespace moecached::replay {
namespace {

Result<SlotChoice> parse_one(std::string_view item, const TraceHeader& header) {
  SlotChoice choice;
  const auto invalid = [&](const std::string& text) {
    return Fault{FaultCode::kInvalid, "--slots: \"" + std::string(item) + "\" " + text};
  };
  if (item == "recorded") {
    if (header.n_slots.empty())
      return invalid("needs a trace that a daemon recorded; this one does not say its slots");
    choice.label = "recorded";
    choice.n_slots = header.n_slots;
  } else {
    const bool is_share = item.ends_with('%');
    const std::string_view digits = item.substr(0, item.size() - (is_share ? 1 : 0));
    double value = 0;
    const auto [rest, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || rest != digits.data() + digits.size() || !(value > 0))
      return invalid("is not a share (25%), a count (8) or \"recorded\"");
    if (is_share && value > 100) return invalid("is more than 100 %");
    if (!is_share && (value != std::floor(value) || value > header.n_experts))
      return invalid("is not a number of slots from 1 to the " + std::to_string(header.n_experts) +
                     " experts");
    const double slots = is_share ? std::max(1.0, std::floor(header.n_experts * value / 100 + 1e-9)) : value;
    choice.label = is_share ? std::string(digits) + " %" : std::string(digits);
    choice.n_slots.assign(header.n_layers, static_cast<std::uint32_t>(slots));
  }
  const double all = std::accumulate(choice.n_slots.begin(), choice.n_slots.end(), 0.0);
  choice.share = all / (static_cast<double>(header.n_layers) * header.n_experts);
  return choice;
}

}  // namespace

Result<std::vector<SlotChoice>> parse_slots(std::string_view text, const TraceHeader& header) {
  std::vector<SlotChoice> out;
  for (;;) {
    const std::size_t comma = text.find(',');
    Result<SlotChoice> one = parse_one(text.substr(0, comma), header);
    if (!one) return std::move(one).error();
    out.push_back(*std::move(one));
    if (comma == std::string_view::npos) return out;
    text.remove_prefix(comma + 1);
  }
}

std::vector<std::uint32_t> private_part(const SlotChoice& all, std::uint32_t n_pools,
                                        const TraceHeader& header) {
  std::vector<std::uint32_t> part;
  for (const std::uint32_t n : all.n_slots) {
    if (n / n_pools < header.n_used) return {};
    part.push_back(n / n_pools);
  }
  return part;
}

}  // namespace moecached::replay
