#include "daemon/policy/policy_libraries.h"

#include <algorithm>

namespace moecached {
namespace {

constexpr std::size_t kNameMax = 64;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_name(std::string_view name) {
  const auto is_allowed = [](char c) {
    return is_letter(c) || (c >= '0' && c <= '9') || c == '-' || c == '_';
  };
  return !name.empty() && name.size() <= kNameMax && is_letter(name.front()) &&
         std::ranges::all_of(name, is_allowed);
}

Fault invalid(const std::string& name, const std::string& text) {
  return {FaultCode::kInvalid, std::string("policy library ").append(name).append(" ").append(text)};
}

}  // namespace

Result<std::optional<std::string>> PolicyLibraries::name_in(std::string_view spec) {
  if (spec.substr(0, spec.find(':')) != kPrefix) return std::optional<std::string>{};
  std::string_view rest = spec.substr(std::min(spec.size(), kPrefix.size() + 1));
  const std::string_view name = rest.substr(0, rest.find(':'));
  if (is_name(name)) return std::optional<std::string>(name);
  return Fault{
      FaultCode::kInvalid,
      std::string("'").append(name) +
          "' is no name of a policy library: write lib:NAME or lib:NAME:OPTIONS, the name of letters, "
          "digits, - and _, a letter first, at most 64"};
}

Status PolicyLibraries::add(const std::string& name, const moecached_policy_api* api) {
  if (find(name) != nullptr) return ok();
  if (libraries_.size() >= kMax) {
    return Fault{FaultCode::kLimit,
                 "there are " + std::to_string(kMax) +
                     " policy libraries already, and they stay until the daemon ends: restart it"};
  }
  if (api == nullptr) return invalid(name, "has no table of functions");
  if (api->abi != MOECACHED_POLICY_ABI) {
    return invalid(name, "is made for version " + std::to_string(api->abi) +
                             " of moecached_policy.h, this daemon has " +
                             std::to_string(MOECACHED_POLICY_ABI) + ": build it with this daemon's header");
  }
  if (api->struct_bytes != sizeof *api) {
    return invalid(name, "has a table of " + std::to_string(api->struct_bytes) + " bytes, it must have " +
                             std::to_string(sizeof *api) + ": build it with this daemon's header");
  }
  const char* missing = api->create == nullptr      ? "create"
                        : api->destroy == nullptr   ? "destroy"
                        : api->on_insert == nullptr ? "on_insert"
                        : api->on_access == nullptr ? "on_access"
                        : api->on_remove == nullptr ? "on_remove"
                        : api->rank == nullptr      ? "rank"
                                                    : nullptr;
  if (missing != nullptr) return invalid(name, std::string("leaves out ") + missing + ", which it must have");
  auto library = std::make_unique<PolicyLibrary>();
  library->name.append(kPrefix).append(":").append(name);
  library->api = api;
  libraries_.push_back(std::move(library));
  return ok();
}

PolicyLibrary* PolicyLibraries::find(std::string_view name) const {
  for (const auto& library : libraries_) {
    if (std::string_view(library->name).substr(kPrefix.size() + 1) == name) return library.get();
  }
  return nullptr;
}

}  // namespace moecached
