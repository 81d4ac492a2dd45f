// The functions of the host's ggml that the plugin calls, found at run time.
//
// What it is: one table of pointers, filled once by resolve_host_api() before anything else runs. What it is
// not: a link-time dependency; sonames differ between llama.cpp builds, and node loads its addon RTLD_LOCAL,
// so the table is filled from the library that called us and its own dependencies. Thread: resolve_host_api()
// is called under ggml's backend registration; afterwards the table is read only.
#ifndef MOECACHED_SHIM_GGML_HOST_API_H_
#define MOECACHED_SHIM_GGML_HOST_API_H_

#include <string>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"

// clang-format off
#define MOECACHED_HOST_FUNCTIONS(X)                                                                              \
  X(ggml_version) X(ggml_commit) X(ggml_init) X(ggml_free) X(ggml_nbytes) X(ggml_op_name) X(ggml_tensor_overhead) \
  X(ggml_new_graph_custom) X(ggml_custom_4d)                                        \
  X(ggml_backend_dev_by_type) X(ggml_backend_buffer_init) X(ggml_backend_buffer_free)                             \
  X(ggml_backend_reg_by_name) X(ggml_backend_buft_alloc_buffer)                                                   \
  X(gguf_init_from_file) X(gguf_free) X(gguf_get_data_offset) X(gguf_get_n_tensors)                               \
  X(gguf_get_tensor_name) X(gguf_get_tensor_offset) X(gguf_get_tensor_size)
// clang-format on

namespace moecached::shim {

struct HostApi {
#define MOECACHED_HOST_MEMBER(name) decltype(&::name) name = nullptr;
  MOECACHED_HOST_FUNCTIONS(MOECACHED_HOST_MEMBER)
#undef MOECACHED_HOST_MEMBER
};

// The table. REQUIRES: resolve_host_api() or set_host_api() before.
const HostApi& host();

// Fills the table from the shared object that contains `caller` (an address inside the host's ggml), else
// from any loaded libggml. Returns "" or a sentence that names what is missing.
std::string resolve_host_api(const void* caller);

// For tests: a table of one's own.
void set_host_api(const HostApi& api);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_HOST_API_H_
