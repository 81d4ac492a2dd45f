// The entry point that ggml looks up in a backend library (GGML_BACKEND_PATH, ggml_backend_load).
//
// NULL means "not here": ggml then goes on without us, after a sentence on stderr that says why.
#include <cstdlib>
#include <string>

#include "shim/ggml/abi_guard.h"
#include "shim/ggml/cpu_hook.h"
#include "shim/ggml/cuda_hook.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/load_hook.h"
#include "shim/ggml/log.h"
#include "shim/ggml/moe_device.h"
#include "shim/ggml/session.h"

namespace moecached::shim {
namespace {

bool build_is_known() {
  const std::string version = host().ggml_version();
  const std::string commit = host().ggml_commit();
  const char* allowed = std::getenv("MOECACHED_ALLOW_GGML");
  switch (judge_build(version, commit, allowed == nullptr ? "" : allowed)) {
    case BuildVerdict::kKnown:
      return true;
    case BuildVerdict::kAllowedByUser:
      say("warning: ggml %s (commit %s) is not a build this plugin was tested with; MOECACHED_ALLOW_GGML "
          "allows it",
          version.c_str(), commit.c_str());
      return true;
    case BuildVerdict::kUnknown:
      break;
  }
  say("not loaded: this is ggml %s (commit %s), and this plugin knows %s; MOECACHED_ALLOW_GGML=%s loads it "
      "all the same",
      version.c_str(), commit.c_str(), known_builds().c_str(), version.c_str());
  return false;
}

// Where experts are to be computed, by MOECACHED_DEVICE or by what there is. Returns "" or a sentence.
std::string choose_device(bool& cuda) {
  const char* variable = std::getenv("MOECACHED_DEVICE");
  const std::string wanted = variable == nullptr ? "" : variable;
  if (!wanted.empty() && wanted != "cpu" && wanted != "cuda") {
    return "MOECACHED_DEVICE=" + wanted + " is neither cpu nor cuda";
  }
  cuda = wanted != "cpu" && has_cuda_device();
  if (wanted == "cuda" && !cuda) return "MOECACHED_DEVICE=cuda, but this program has no CUDA device";
  return "";
}

ggml_backend_reg_t init(const void* caller) {
  static ggml_backend_reg_t registry = nullptr;
  if (registry != nullptr) return registry;
  if (const std::string missing = resolve_host_api(caller); !missing.empty()) {
    say("not loaded: %s", missing.c_str());
    return nullptr;
  }
  if (!build_is_known()) return nullptr;
  if (const std::string difference = probe_layout(); !difference.empty()) {
    say("not loaded: ggml %s (commit %s) was built with other structures: %s", host().ggml_version(),
        host().ggml_commit(), difference.c_str());
    return nullptr;
  }
  ggml_backend_dev_t cpu = host().ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) {
    say("not loaded: no CPU backend is loaded yet; load it first (ggml_backend_load_all does)");
    return nullptr;
  }
  bool cuda = false;
  if (const std::string reason = choose_device(cuda); !reason.empty()) {
    say("not loaded: %s", reason.c_str());
    return nullptr;
  }
  if (const std::string reason = Session::instance().open(); !reason.empty()) {
    say("not loaded: %s", reason.c_str());
    return nullptr;
  }
  if (cuda) {
    if (const std::string reason = hook_cuda_devices(); !reason.empty()) {
      say("not loaded: %s", reason.c_str());
      return nullptr;
    }
  }
  install_load_hook();
  // Beside GPUs too: it computes the tensors that the daemon does not serve there.
  hook_cpu_device(cpu);
  registry = moe_registry();
  debug("loaded into ggml %s (commit %s)", host().ggml_version(), host().ggml_commit());
  return registry;
}

}  // namespace
}  // namespace moecached::shim

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
  return moecached::shim::init(__builtin_return_address(0));
}
