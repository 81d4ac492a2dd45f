// Brings the policy library that a spec names into the core loop's table. Files and code are looked at on the
// caller's thread, so that the loop waits for no disk. Who may ask is who may reach the control socket with
// SetPolicy; what can be loaded is what root has put into policy.directory. Thread: any but the core loop.
#pragma once

#include <string>

#include "daemon/base/result.h"
#include "daemon/ipc/core.h"

namespace moecached {

// ok: the spec names no library, or one that is loaded. kInvalid, kNotFound, kLimit: the text says what to
// do.
[[nodiscard]] Status load_policy_library(Core& core, const std::string& directory, const std::string& spec);

}  // namespace moecached
