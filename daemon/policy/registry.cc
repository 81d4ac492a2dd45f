#include "daemon/policy/registry.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "daemon/policy/admission.h"
#include "daemon/policy/arc.h"
#include "daemon/policy/ewma.h"
#include "daemon/policy/fifo.h"
#include "daemon/policy/learned.h"
#include "daemon/policy/lfu.h"
#include "daemon/policy/library_policy.h"
#include "daemon/policy/lru.h"
#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/s3fifo.h"
#include "daemon/policy/sieve.h"
#include "daemon/policy/slru.h"
#include "daemon/policy/static.h"
#include "daemon/policy/wtinylfu.h"

namespace moecached {
namespace {

struct Entry {
  std::string_view name;
  Result<std::unique_ptr<EvictionPolicy>> (*make)(std::string_view options, PolicyShape shape);
};

// A new policy joins here, and with it every test that runs over policy_names().
constexpr auto kPolicies = std::to_array<Entry>({
    {ArcPolicy::kName, &ArcPolicy::make},
    {EwmaPolicy::kName, &EwmaPolicy::make},
    {FifoPolicy::kName, &FifoPolicy::make},
    {LearnedPolicy::kName, &LearnedPolicy::make},
    {LfuPolicy::kName, &LfuPolicy::make},
    {LruPolicy::kName, &LruPolicy::make},
    {S3FifoPolicy::kName, &S3FifoPolicy::make},
    {SievePolicy::kName, &SievePolicy::make},
    {SlruPolicy::kName, &SlruPolicy::make},
    {StaticPolicy::kName, &StaticPolicy::make},
    {WTinyLfuPolicy::kName, &WTinyLfuPolicy::make},
});

constexpr auto kNames = [] {
  std::array<std::string_view, kPolicies.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kPolicies[i].name;
  return names;
}();

struct LibrarySpec {
  std::string name;
  AdmissionSplit split;
};
// Of "lib:NAME:options"; nothing for other specs.
Result<std::optional<LibrarySpec>> parse_library(std::string_view spec) {
  Result<std::optional<std::string>> name = PolicyLibraries::name_in(spec);
  if (!name) return std::move(name).error();
  if (!name->has_value()) return std::optional<LibrarySpec>{};
  const std::size_t name_end = PolicyLibraries::kPrefix.size() + 1 + (*name)->size();
  const std::string_view options = spec.size() > name_end ? spec.substr(name_end + 1) : std::string_view();
  Result<AdmissionSplit> split = split_admission(spec.substr(0, name_end), options);
  if (!split) return std::move(split).error();
  return std::optional(LibrarySpec{.name = **std::move(name), .split = *std::move(split)});
}

}  // namespace

Status check_policy(std::string_view given) {
  const std::string spec = canonical_policy(given);
  const Result<std::optional<LibrarySpec>> library = parse_library(spec);
  if (!library) return library.error();
  if (library->has_value()) return ok();
  if (auto policy = make_policy(spec, {.n_experts = 128, .n_slots = 64}); !policy)
    return std::move(policy).error();
  return ok();
}

std::span<const std::string_view> policy_names() { return kNames; }

std::string canonical_policy(std::string_view spec) {
  std::string canonical(spec);
  const auto name_end = std::ranges::find(canonical, ':');
  std::transform(canonical.begin(), name_end, canonical.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return canonical;
}

Result<std::unique_ptr<EvictionPolicy>> make_policy(std::string_view given, PolicyShape shape,
                                                    const PolicyLibraries* libraries) {
  const std::string spec = canonical_policy(given);
  if (shape.n_slots == 0 || shape.n_slots > shape.n_experts) {
    return Fault{FaultCode::kInvalid, "policy " + spec + ": " + std::to_string(shape.n_slots) +
                                          " slots for " + std::to_string(shape.n_experts) +
                                          " experts; a layer needs 1 slot up to one per expert"};
  }
  const Result<std::optional<LibrarySpec>> named = parse_library(spec);
  if (!named) return named.error();
  if (named->has_value()) {
    const auto& [library_name, split] = **named;
    PolicyLibrary* const library = libraries == nullptr ? nullptr : libraries->find(library_name);
    if (library == nullptr) {
      return Fault{FaultCode::kInvalid, "the policy library " + library_name +
                                            " is not loaded: only a running daemon loads one, from its "
                                            "policy.directory"};
    }
    auto policy = LibraryPolicy::make(*library, split.policy_options, shape);
    if (!policy) return std::move(policy).error();
    return with_admission(split.admission, shape, std::move(policy).value());
  }
  const std::size_t colon = spec.find(':');
  const std::string_view name = std::string_view(spec).substr(0, colon);
  const std::string_view options =
      colon == std::string::npos ? std::string_view() : std::string_view(spec).substr(colon + 1);
  for (const Entry& entry : kPolicies) {
    if (entry.name != name) continue;
    const Result<AdmissionSplit> split = split_admission(name, options);
    if (!split) return split.error();
    auto policy = entry.make(split->policy_options, shape);
    if (!policy) return std::move(policy).error();
    return with_admission(split->admission, shape, std::move(policy).value());
  }
  std::string known;
  for (std::string_view each : kNames) known.append(known.empty() ? "" : ", ").append(each);
  known.append(", and lib:NAME for a library");
  return Fault{FaultCode::kInvalid, "no policy '" + std::string(name) + "'; there are " + known};
}

}  // namespace moecached
