// The policies that came from shared libraries, by name: "lib:NAME:options" in a spec. It opens no file:
// whoever does hands the table of functions in. Thread: core loop. Memory: at most kMax libraries, kept until
// the end, as policies and their code may be in use.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/moecached_policy.h"

namespace moecached {

struct PolicyLibrary {
  std::string name;  // "lib:NAME"
  const moecached_policy_api* api = nullptr;
  std::uint64_t wrong_answers = 0;     // of all its policies; LRU decided in those calls
  const char* last_wrong_answer = "";  // what it was
  bool is_said = false;                // for whoever reports it
};

class PolicyLibraries {
 public:
  static constexpr std::size_t kMax = 16;
  static constexpr std::string_view kPrefix = "lib";

  // NAME of "lib:NAME:options"; nothing for other specs. kInvalid: no name that may name a file: letters,
  // digits,
  // '-' and '_', a letter first, at most 64.
  [[nodiscard]] static Result<std::optional<std::string>> name_in(std::string_view spec);

  // kInvalid: another version of the interface, or functions are missing. kLimit. A name that is there stays.
  Status add(const std::string& name, const moecached_policy_api* api);
  [[nodiscard]] PolicyLibrary* find(std::string_view name) const;  // nullptr: not loaded
  [[nodiscard]] std::span<const std::unique_ptr<PolicyLibrary>> all() const { return libraries_; }

 private:
  std::vector<std::unique_ptr<PolicyLibrary>> libraries_;
};

}  // namespace moecached
