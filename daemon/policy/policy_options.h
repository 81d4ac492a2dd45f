// The options of a policy spec, "key=value,key=value", read one known key after the other. What no factory
// asked for is an error that names the keys that it did ask for. Thread: any. Memory: views into the spec,
// which must outlive it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

class PolicyOptions {
 public:
  // Every policy has this option: admission.h takes it out before a policy sees its own, and errors name it.
  static constexpr std::string_view kAdmit = "admit";

  // `policy` is named in errors. kInvalid: an item without "=", or a key given twice.
  [[nodiscard]] static Result<PolicyOptions> parse(std::string_view policy, std::string_view text);

  // The option as a whole number in [low, high]; `fallback` when it was not given.
  struct Bounds {
    std::uint32_t low = 0, high = 0;
  };
  [[nodiscard]] Result<std::uint32_t> number(std::string_view key, Bounds bounds, std::uint32_t fallback);
  // The position in `words` of the option's value; 0 when it was not given.
  [[nodiscard]] Result<std::size_t> word(std::string_view key, std::span<const std::string_view> words);
  // The spec again, as text, less one option.
  [[nodiscard]] std::string without(std::string_view key) const;
  // kInvalid: the spec has an option that was never asked for.
  [[nodiscard]] Status all_known() const;

 private:
  [[nodiscard]] const std::string_view* find(std::string_view key) const;
  [[nodiscard]] Fault fault(std::string text) const;

  std::string_view policy_;
  std::vector<std::pair<std::string_view, std::string_view>> given_;
  std::vector<std::string_view> known_;
};

}  // namespace moecached
