// Buffers in huge pages, where the kernel grants them, for reads that cannot or should not go straight into
// their destination. Thread: the io thread.
// Memory: one anonymous mapping, populated as it is used (all of it when it is registered with io_uring).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

class Staging {
 public:
  Staging() = default;
  // buffer_bytes: a multiple of 4096.
  [[nodiscard]] static Result<Staging> create(std::uint32_t n_buffers, std::uint64_t buffer_bytes);
  Staging(Staging&& other) noexcept;
  Staging& operator=(Staging&& other) noexcept;
  ~Staging();

  [[nodiscard]] bool empty() const { return free_.empty(); }
  [[nodiscard]] std::byte* take();  // REQUIRES: not empty
  void give_back(std::byte* buffer) { free_.push_back(buffer); }
  [[nodiscard]] std::span<std::byte> memory() const { return memory_; }

 private:
  std::span<std::byte> mapping_;
  std::span<std::byte> memory_;  // the part of it that starts with a huge page
  std::vector<std::byte*> free_;
};

}  // namespace moecached
