// The table of policies: one explicit line each, in registry.cc.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"

namespace moecached {

class PolicyLibraries;

struct PolicyShape {
  std::uint32_t n_experts = 0;  // ids are 0..n_experts-1
  std::uint32_t n_slots = 0;    // how many can be resident at once
};

// The spec as it is kept and shown: the policy's name in small letters. Names are taken in any case.
[[nodiscard]] std::string canonical_policy(std::string_view spec);

// spec: "lru", "slru:probation=20", "lfu:halve=64,admit=second-miss". Every policy takes
// admit=always|second-miss|value (admission.h). Options a policy does not know are an error that lists those
// it knows; an unknown name lists the names.
// "lib:NAME:options" is one of `libraries`.
[[nodiscard]] Result<std::unique_ptr<EvictionPolicy>> make_policy(std::string_view spec, PolicyShape shape,
                                                                  const PolicyLibraries* libraries = nullptr);
// Whether a spec is well-formed, which does not depend on the shape. Of a library that need not be loaded
// yet, as far as can be told.
[[nodiscard]] Status check_policy(std::string_view spec);
[[nodiscard]] std::span<const std::string_view> policy_names();

}  // namespace moecached
