// What the SSD tier needs of the kernel: start reads, wait for any of them or for a wake-up. Two
// implementations, io_uring and a pool of pread threads; tests wrap one to inject faults. An engine does not
// retry, align, copy or know requests. Thread: the io thread creates, uses and destroys it; only wake() is
// called by others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "daemon/base/result.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

struct EngineRead {
  std::uint32_t id = 0;  // comes back with the result
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  std::byte* memory = nullptr;
};

struct EngineDone {
  std::uint32_t id = 0;
  std::int32_t result = 0;  // bytes, or -errno
};

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual std::uint32_t depth_max() const = 0;  // reads that may be started and not yet done

  // file < kMaxFiles. The descriptor stays the caller's, and open until remove_file.
  // is_copied: the CPU copies what is read, from the page cache or a file in memory, while whoever starts the
  // read waits.
  virtual void add_file(std::uint32_t file, int fd, bool is_copied) = 0;
  virtual void remove_file(std::uint32_t file) = 0;

  [[nodiscard]] virtual bool can_register_memory() const = 0;  // false: it would gain nothing
  // Pins memory that reads go to, which populates it.
  // REQUIRES: at most 1 GiB, not yet registered.
  virtual Status register_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_memory(std::span<std::byte> memory) = 0;

  virtual void start(const EngineRead& read) = 0;
  // Hands what was started to the kernel and returns what is done. block: waits for at least one, or for
  // wake().
  [[nodiscard]] virtual std::size_t wait(std::span<EngineDone> done, bool block) = 0;
  virtual void wake() = 0;
};

inline constexpr std::uint32_t kMaxFiles = 4096;
inline constexpr std::uint64_t kRegisterBytesMax = 1u << 30;  // the kernel's limit for one registered buffer

// kSystem: the kernel refuses io_uring.
[[nodiscard]] Result<std::unique_ptr<ReadEngine>> make_uring_engine(std::uint32_t queue_depth);
[[nodiscard]] Result<std::unique_ptr<ReadEngine>> make_pread_engine(std::uint32_t queue_depth);

// Called on the io thread. `why_not_better` is filled when the engine is a fallback.
using EngineFactory = std::function<Result<std::unique_ptr<ReadEngine>>(const SsdOptions& options,
                                                                        std::string& why_not_better)>;
[[nodiscard]] Result<std::unique_ptr<ReadEngine>> make_engine(const SsdOptions& options,
                                                              std::string& why_not_better);

// make_ssd_tier with another engine: the seam for tests.
[[nodiscard]] Result<std::unique_ptr<SsdTier>> make_ssd_tier_over(const SsdOptions& options,
                                                                  const EngineFactory& factory);

}  // namespace moecached
