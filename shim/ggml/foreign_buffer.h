// A buffer for tensors whose memory is somebody else's: it has the type of the GPU's own memory, so that
// stock code takes its tensors for its own, and frees nothing. Thread: any. Memory: the caller frees the
// buffer.
#ifndef MOECACHED_SHIM_GGML_FOREIGN_BUFFER_H_
#define MOECACHED_SHIM_GGML_FOREIGN_BUFFER_H_

#include "ggml-backend-impl.h"

namespace moecached::shim {

ggml_backend_buffer_t make_foreign_buffer(ggml_backend_dev_t device);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_FOREIGN_BUFFER_H_
