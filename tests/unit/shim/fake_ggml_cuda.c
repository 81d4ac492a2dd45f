// Stands for libggml-cuda: imports the runtime's copy from another library.
#include <stddef.h>

int cudaMemcpyAsync(void* destination, const void* source, size_t bytes, int kind, void* stream);
int fake_backend_copy(void* destination, const void* source, size_t bytes, void* stream);

int fake_backend_copy(void* destination, const void* source, size_t bytes, void* stream) {
  return cudaMemcpyAsync(destination, source, bytes, 3, stream);
}
