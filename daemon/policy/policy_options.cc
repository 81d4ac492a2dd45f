#include "daemon/policy/policy_options.h"

#include <algorithm>
#include <charconv>

namespace moecached {
namespace {

// Built with append: GCC 12 sees a false overlap (-Wrestrict) in literal + std::string at -O3.
std::string quoted(std::string_view text) { return std::string().append("'").append(text).append("'"); }

std::string joined(std::span<const std::string_view> words) {
  std::string out;
  for (std::string_view word : words) {
    if (!out.empty()) out += ", ";
    out += word;
  }
  return out;
}

}  // namespace

Fault PolicyOptions::fault(std::string text) const {
  return Fault{FaultCode::kInvalid, "policy " + std::string(policy_) + ": " + std::move(text)};
}

Result<PolicyOptions> PolicyOptions::parse(std::string_view policy, std::string_view text) {
  PolicyOptions options;
  options.policy_ = policy;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (equals == 0 || equals == std::string_view::npos) {
      return options.fault("option " + quoted(item) + " is not KEY=VALUE");
    }
    const std::string_view key = item.substr(0, equals);
    if (options.find(key) != nullptr) return options.fault("option " + quoted(key) + " is given twice");
    options.given_.emplace_back(key, item.substr(equals + 1));
  }
  return options;
}

const std::string_view* PolicyOptions::find(std::string_view key) const {
  for (const auto& [name, value] : given_) {
    if (name == key) return &value;
  }
  return nullptr;
}

Result<std::uint32_t> PolicyOptions::number(std::string_view key, Bounds bounds, std::uint32_t fallback) {
  known_.push_back(key);
  const std::string_view* text = find(key);
  if (text == nullptr) return fallback;
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc{} || end != text->data() + text->size() || value < bounds.low ||
      value > bounds.high) {
    return fault(std::string(key) + "=" + std::string(*text) + " is not a whole number from " +
                 std::to_string(bounds.low) + " to " + std::to_string(bounds.high));
  }
  return value;
}

Result<std::size_t> PolicyOptions::word(std::string_view key, std::span<const std::string_view> words) {
  known_.push_back(key);
  const std::string_view* text = find(key);
  if (text == nullptr) return std::size_t{0};
  const auto at = std::find(words.begin(), words.end(), *text);
  if (at == words.end()) {
    return fault(std::string(key) + "=" + std::string(*text) + " is not one of " + joined(words));
  }
  return static_cast<std::size_t>(at - words.begin());
}

std::string PolicyOptions::without(std::string_view key) const {
  std::string out;
  for (const auto& [name, value] : given_) {
    if (name == key) continue;
    if (!out.empty()) out += ',';
    out.append(name).append("=").append(value);
  }
  return out;
}

Status PolicyOptions::all_known() const {
  for (const auto& [name, value] : given_) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    std::vector<std::string_view> known = known_;
    known.push_back(kAdmit);
    return fault("no option " + quoted(name) + "; it has " + joined(known));
  }
  return ok();
}

}  // namespace moecached
