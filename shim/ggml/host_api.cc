#include "shim/ggml/host_api.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <vector>

namespace moecached::shim {
namespace {

HostApi g_api;

// Returns the name of the first function that is missing, or nullptr. A lookup on a handle also searches the
// libraries that it depends on, so libggml is enough to reach libggml-base.
const char* fill(void* handle, HostApi& api) {
#define MOECACHED_HOST_LOOKUP(name)                                      \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(handle, #name)); \
  if (api.name == nullptr) return #name;
  MOECACHED_HOST_FUNCTIONS(MOECACHED_HOST_LOOKUP)
#undef MOECACHED_HOST_LOOKUP
  return nullptr;
}

int collect_ggml(dl_phdr_info* info, std::size_t, void* out) {
  if (std::strstr(info->dlpi_name, "libggml") != nullptr) {
    static_cast<std::vector<std::string>*>(out)->push_back(info->dlpi_name);
  }
  return 0;
}

}  // namespace

const HostApi& host() { return g_api; }

void set_host_api(const HostApi& api) { g_api = api; }

std::string resolve_host_api(const void* caller) {
  std::vector<std::string> candidates;
  Dl_info where;
  if (caller != nullptr && dladdr(caller, &where) != 0 && where.dli_fname != nullptr) {
    candidates.push_back(where.dli_fname);
  }
  dl_iterate_phdr(collect_ggml, &candidates);
  const char* missing = "ggml_version";
  for (const std::string& path : candidates) {
    // NOLOAD: only what the host runs with already; a second copy of ggml would have a registry of its own.
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    HostApi api;
    missing = fill(handle, api);
    dlclose(handle);
    if (missing == nullptr) {
      g_api = api;
      return "";
    }
  }
  HostApi api;  // a host with ggml linked into the executable, exported
  if (const char* still = fill(RTLD_DEFAULT, api); still == nullptr) {
    g_api = api;
    return "";
  }
  return std::string("the host's ggml exports no ") + missing +
         ": a build with shared libggml libraries is needed";
}

}  // namespace moecached::shim
