// One memory that can hold slots: host RAM (device_host) or a GPU (device_cuda, another file, when it
// exists). The rest of the daemon sees only this. Thread: any, unless said. Memory: a Pool owns its bytes
// until destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "daemon/base/result.h"

namespace moecached {

struct PoolSize {
  std::uint64_t bytes = 0;             // addresses
  std::uint64_t bytes_backed_max = 0;  // of them, backed by memory at one time: the owner keeps to it
  // Of which all may be backed.
  PoolSize(std::uint64_t all) : bytes(all), bytes_backed_max(all) {}  // NOLINT: every pool but traded ones
  PoolSize(std::uint64_t addresses, std::uint64_t backed) : bytes(addresses), bytes_backed_max(backed) {}
};

class Pool {
 public:
  virtual ~Pool() = default;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;  // addresses
  [[nodiscard]] virtual std::uint64_t bytes_backed_max() const = 0;
  // Descriptor to hand to a client, which can map it read-only. Borrowed: stays owned by the pool.
  [[nodiscard]] virtual int export_fd() const = 0;
  // The whole pool when the CPU can write it in place (reads from SSD go straight there); empty otherwise.
  [[nodiscard]] virtual std::span<std::byte> host_view() = 0;
  // Copies into / out of the pool and returns when the bytes are there; reading gives no memory to what has
  // none. kInvalid: out of range.
  virtual Status write(std::uint64_t offset, std::span<const std::byte> source) = 0;
  virtual Status read(std::uint64_t offset, std::span<std::byte> destination) const = 0;
  // Gives the memory of the whole pages in this range back; they read as zero from then on. kInvalid: out of
  // range; kSystem: they keep it.
  virtual Status release(std::uint64_t offset, std::uint64_t bytes) = 0;
  // Bytes backed by memory now; a host pool is populated as slots are filled.
  [[nodiscard]] virtual std::uint64_t bytes_backed() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;  // "host", or the GPU's UUID
  // kLimit / kSystem: the text says how much was asked for, how much there is, and what to do.
  virtual Result<std::unique_ptr<Pool>> create_pool(std::string_view label, PoolSize size) = 0;
};

[[nodiscard]] std::unique_ptr<Device> make_host_device();

}  // namespace moecached
