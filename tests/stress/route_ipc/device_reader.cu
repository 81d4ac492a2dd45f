#include "tests/stress/route_ipc/device_reader.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "route_ipc_check: %s: %s\n", what, cudaGetErrorString(result));
  std::exit(2);
}

}  // namespace

std::string uuid_of_gpu(int ordinal) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return "";
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(properties.uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

DeviceReader::DeviceReader(const std::string& handle, int ordinal) : ordinal_(ordinal) {
  cudaIpcMemHandle_t given;
  if (handle.size() != sizeof given) {
    std::fprintf(stderr, "route_ipc_check: a handle of %zu bytes\n", handle.size());
    std::exit(2);
  }
  std::memcpy(&given, handle.data(), sizeof given);
  check(cudaSetDevice(ordinal_), "cudaSetDevice");
  check(cudaIpcOpenMemHandle(&memory_, given, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
}

DeviceReader::~DeviceReader() {
  check(cudaSetDevice(ordinal_), "cudaSetDevice");
  check(cudaIpcCloseMemHandle(memory_), "cudaIpcCloseMemHandle");
}

void DeviceReader::read(std::uint64_t offset, std::byte* out, std::size_t bytes) const {
  check(cudaMemcpy(out, static_cast<const char*>(memory_) + offset, bytes, cudaMemcpyDeviceToHost),
        "cudaMemcpy");
}
