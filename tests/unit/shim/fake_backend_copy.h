// fake_ggml_cuda.c and fake_cudart.c, opened once; the fetch hook is installed in the first.
#ifndef MOECACHED_TESTS_UNIT_SHIM_FAKE_BACKEND_COPY_H_
#define MOECACHED_TESTS_UNIT_SHIM_FAKE_BACKEND_COPY_H_

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>

#include "shim/ggml/cuda_fetch.h"

namespace moecached::testing {

struct FakeBackendCopy {
  int (*copy)(void* destination, const void* source, std::size_t bytes, void* stream);
  int (*runtime_copies)();

  static const FakeBackendCopy& hooked() {
    static const FakeBackendCopy instance = [] {
      void* library = dlopen(FAKE_GGML_CUDA, RTLD_NOW | RTLD_LOCAL);  // never closed: its tables stay patched
      if (library == nullptr) throw std::runtime_error(dlerror());
      FakeBackendCopy functions{};
      functions.copy = reinterpret_cast<decltype(functions.copy)>(dlsym(library, "fake_backend_copy"));
      functions.runtime_copies =
          reinterpret_cast<decltype(functions.runtime_copies)>(dlsym(library, "fake_cudart_copies"));
      if (!shim::install_fetch_hook(reinterpret_cast<const void*>(functions.copy)))
        throw std::runtime_error("the fetch hook cannot be installed");
      return functions;
    }();
    return instance;
  }
};

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_FAKE_BACKEND_COPY_H_
