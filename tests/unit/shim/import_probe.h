// The functions of import_probe.c, from one of its two builds.
#ifndef MOECACHED_TESTS_UNIT_SHIM_IMPORT_PROBE_H_
#define MOECACHED_TESTS_UNIT_SHIM_IMPORT_PROBE_H_

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>

namespace moecached::testing {

struct ImportProbe {
  explicit ImportProbe(const char* path) {
    void* handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);  // never closed: its tables stay patched
    if (handle == nullptr) throw std::runtime_error(dlerror());
    map = reinterpret_cast<decltype(map)>(dlsym(handle, "probe_mmap"));
    unmap = reinterpret_cast<decltype(unmap)>(dlsym(handle, "probe_munmap"));
    lock = reinterpret_cast<decltype(lock)>(dlsym(handle, "probe_mlock"));
    advise = reinterpret_cast<decltype(advise)>(dlsym(handle, "probe_advise"));
  }
  void* (*map)(std::size_t bytes, int flags, int fd);
  int (*unmap)(void* address, std::size_t bytes);
  int (*lock)(const void* address, std::size_t bytes);
  int (*advise)(void* address, std::size_t bytes, int advice);
};

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_IMPORT_PROBE_H_
