#include "shim/ggml/foreign_buffer.h"

#include <cstdint>

#include "shim/ggml/host_api.h"

namespace moecached::shim {
namespace {

// Nobody asks a buffer of weights where it begins, but ggml asserts that it begins somewhere.
void* foreign_base(ggml_backend_buffer_t buffer) { return buffer; }
void foreign_clear(ggml_backend_buffer_t, uint8_t) {}

}  // namespace

ggml_backend_buffer_t make_foreign_buffer(ggml_backend_dev_t device) {
  ggml_backend_buffer_i table = {};
  table.get_base = foreign_base;
  table.clear = foreign_clear;
  ggml_backend_buffer_t buffer =
      host().ggml_backend_buffer_init(device->iface.get_buffer_type(device), table, nullptr, 1);
  // Stock clears the padding behind tensors in compute buffers; the windows are read-only.
  buffer->usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
  return buffer;
}

}  // namespace moecached::shim
