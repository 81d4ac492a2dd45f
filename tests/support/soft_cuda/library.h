// The soft CUDA driver as a test sees it: $MOECACHED_LIBCUDA names it to the code under test, and its
// functions for tests are found by name. The target defines MOECACHED_SOFT_CUDA, the library's path. Thread:
// any.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/support/soft_cuda/soft_cuda.h"

namespace moecached::test {

// The functions of the soft driver that this process has loaded.
class SoftCuda {
 public:
  SoftCuda() {
    ::setenv("MOECACHED_LIBCUDA", MOECACHED_SOFT_CUDA, 1);
    library_ = ::dlopen(MOECACHED_SOFT_CUDA, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(::dlerror());
  }
  template <typename Function>
  [[nodiscard]] Function* get(const char* name) const {
    void* const found = ::dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(name);
    return reinterpret_cast<Function*>(found);
  }
  [[nodiscard]] unsigned long long vram_used() const {
    return get<decltype(soft_cuda_vram_used)>("soft_cuda_vram_used")();
  }
  [[nodiscard]] unsigned long long objects() const {
    return get<decltype(soft_cuda_objects)>("soft_cuda_objects")();
  }
  void fail_next(const char* function, CUresult result) const {
    get<decltype(soft_cuda_fail_next)>("soft_cuda_fail_next")(function, result);
  }
  void hold_next(const char* function) const {
    get<decltype(soft_cuda_hold_next)>("soft_cuda_hold_next")(function);
  }
  [[nodiscard]] bool holds() const { return get<decltype(soft_cuda_holds)>("soft_cuda_holds")() != 0; }
  void release() const { get<decltype(soft_cuda_release)>("soft_cuda_release")(); }
  // The driver functions that `body` calls, one a line.
  template <typename Body>
  [[nodiscard]] std::string calls_of(Body body) const {
    get<decltype(soft_cuda_trace_start)>("soft_cuda_trace_start")();
    body();
    return get<decltype(soft_cuda_trace_stop)>("soft_cuda_trace_stop")();
  }
  [[nodiscard]] CUcontext current() const {
    CUcontext context = nullptr;
    get<CUresult(CUcontext*)>("cuCtxGetCurrent")(&context);
    return context;
  }

 private:
  void* library_ = nullptr;
};

}  // namespace moecached::test
