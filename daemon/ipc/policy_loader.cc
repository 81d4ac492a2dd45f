#include "daemon/ipc/policy_loader.h"

#include <spdlog/spdlog.h>

#include "daemon/platform/shared_library.h"
#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"

namespace moecached {

Status load_policy_library(Core& core, const std::string& directory, const std::string& spec) {
  const Result<std::optional<std::string>> named = PolicyLibraries::name_in(canonical_policy(spec));
  if (!named) return Fault(named.error());
  if (!named->has_value()) return ok();
  const std::string& name = **named;
  if (core.call([&](Core& loop) { return loop.policy_libraries().find(name) != nullptr; })) return ok();
  if (directory.empty()) {
    return Fault{FaultCode::kInvalid,
                 "policy lib:" + name +
                     ": this daemon loads no libraries; set policy.directory to a directory "
                     "of root's and restart it"};
  }
  Result<SharedLibrary> library = SharedLibrary::open_trusted(directory, name);
  if (!library) return std::move(library).error().with_context("policy lib:" + name);
  using Entry = decltype(&moecached_policy_entry);
  const auto entry = reinterpret_cast<Entry>(library->symbol(MOECACHED_POLICY_ENTRY));
  if (entry == nullptr) {
    return Fault{FaultCode::kInvalid, "policy lib:" + name +
                                          " exports no " MOECACHED_POLICY_ENTRY
                                          ": it is no policy library, see moecached_policy.h"};
  }
  const moecached_policy_api* const api = entry();
  const Status added = core.call([&](Core& loop) { return loop.policy_libraries().add(name, api); });
  if (!added) return added;
  library->keep();
  spdlog::info("policy library {} loaded from {}", name, directory);
  return ok();
}

}  // namespace moecached
