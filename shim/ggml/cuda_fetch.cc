#include "shim/ggml/cuda_fetch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "shim/ggml/got_patch.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {
namespace {

// cudaError_t cudaMemcpyAsync(void*, const void*, size_t, enum cudaMemcpyKind, cudaStream_t): enums are ints.
using MemcpyAsync = int (*)(void*, const void*, std::size_t, int, void*);
constexpr const char* kMemcpyAsync = "cudaMemcpyAsync";
constexpr int kCudaSuccess = 0;

MemcpyAsync g_stock = nullptr;
thread_local FetchScope* t_scope = nullptr;

int hooked_memcpy_async(void* destination, const void* source, std::size_t bytes, int kind, void* stream) {
  if (t_scope != nullptr && FetchScope::take(destination, bytes, stream)) return kCudaSuccess;
  return g_stock(destination, source, bytes, kind, stream);
}

// The function that the library with `code` would call.
MemcpyAsync stock_of(const void* code) {
  Dl_info info = {};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  void* found = library != nullptr ? dlsym(library, kMemcpyAsync) : nullptr;  // it or what it depends on
  if (library != nullptr) dlclose(library);
  return reinterpret_cast<MemcpyAsync>(found);
}

}  // namespace

bool install_fetch_hook(const void* code) {
  if (g_stock != nullptr) return true;
  const char* wanted = std::getenv("MOECACHED_FETCH");
  if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return false;
  const MemcpyAsync stock = stock_of(code);
  if (stock == nullptr) {
    debug("ggml-cuda imports no %s: experts in RAM are read in place, graphs of models that spill are cut",
          kMemcpyAsync);
    return false;
  }
  g_stock = stock;  // before the first call can arrive
  const Replacement replacement = {kMemcpyAsync, reinterpret_cast<void*>(hooked_memcpy_async)};
  if (patch_imports_of(code, {&replacement, 1}) == 0) {
    g_stock = nullptr;
    debug(
        "ggml-cuda's %s cannot be replaced: experts in RAM are read in place, graphs of models that spill "
        "are cut",
        kMemcpyAsync);
    return false;
  }
  return true;
}

bool can_fetch() { return g_stock != nullptr; }

bool fetch_on(moecached_gpu_lane* lane, const PlannedFetch& fetch, void* stream) {
  const moecached_gpu_fetch request = {stream, fetch.slots, fetch.fetched, fetch.n_ids, fetch.layer};
  if (moecached_gpu_lane_fetch(lane, &request) != MOECACHED_OK) {
    say("experts are read in place: %s", moecached_last_error());
    return false;
  }
  ++Session::instance().counters().gpu_fetches;
  return true;
}

FetchScope::FetchScope(std::span<const PlannedFetch> fetches, const Enqueue& enqueue)
    : fetches_(fetches), enqueue_(enqueue) {
  t_scope = this;
}

FetchScope::~FetchScope() { t_scope = nullptr; }

bool FetchScope::take(const void* destination, std::size_t bytes, void* stream) {
  const FetchScope* scope = t_scope;
  if (scope == nullptr) return false;
  const auto address = reinterpret_cast<uint64_t>(destination);
  const auto found =
      std::lower_bound(scope->fetches_.begin(), scope->fetches_.end(), address,
                       [](const PlannedFetch& fetch, uint64_t wanted) { return fetch.fetched < wanted; });
  if (found == scope->fetches_.end() || found->fetched != address || bytes != found->n_ids * sizeof(int32_t))
    return false;
  return scope->enqueue_(*found, stream);
}

}  // namespace moecached::shim
