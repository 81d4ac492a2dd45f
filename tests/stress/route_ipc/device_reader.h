// Memory of another process on a GPU, by a legacy handle and plain calls of the CUDA runtime. Faults end the
// program with a sentence. Thread: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// "GPU-01234567-...", as nvidia-smi prints it; empty: there is none.
[[nodiscard]] std::string uuid_of_gpu(int ordinal);

class DeviceReader {
 public:
  // handle: 64 bytes, of memory on the GPU with this number.
  DeviceReader(const std::string& handle, int ordinal);
  ~DeviceReader();
  DeviceReader(const DeviceReader&) = delete;
  DeviceReader& operator=(const DeviceReader&) = delete;
  // Copies from device memory into `out`.
  void read(std::uint64_t offset, std::byte* out, std::size_t bytes) const;

 private:
  int ordinal_;
  void* memory_ = nullptr;
};
