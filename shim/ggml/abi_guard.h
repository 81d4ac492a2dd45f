// Decides whether this ggml is one whose structures the plugin knows.
//
// Why: the plugin writes into ggml's device, backend and graph structures. Their layout changes between
// commits while GGML_BACKEND_API_VERSION stays, so a version number is not enough: the build must be on the
// list, and a probe looks at objects made by the host itself. An unknown build is refused with a sentence,
// never tried.
#ifndef MOECACHED_SHIM_GGML_ABI_GUARD_H_
#define MOECACHED_SHIM_GGML_ABI_GUARD_H_

#include <string>
#include <string_view>

namespace moecached::shim {

enum class BuildVerdict {
  kKnown,
  kAllowedByUser,  // MOECACHED_ALLOW_GGML names this version
  kUnknown,
};

// allowed_by_user: the value of MOECACHED_ALLOW_GGML, or "".
BuildVerdict judge_build(std::string_view version, std::string_view commit, std::string_view allowed_by_user);

// "0.25.1 (commit 0ad4a86, or a source tree without upstream history)": for the refusal.
std::string known_builds();

// Compares structures made by the host with the headers this plugin was built from. Returns "" or what
// differs. REQUIRES: the host API is resolved.
std::string probe_layout();

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_ABI_GUARD_H_
