// One GPU: memory that other processes can map (device slots, pinned host slots), and a queue that copies
// between the two and flips slot table entries in the background. The rest of the daemon sees only this;
// every CUDA call is in gpu_cuda.cc and cuda_queue.cc. libcuda is loaded by list_gpus, so the same program
// runs where there is none. Thread: any, unless said. Memory: objects own what they made; they keep the GPU's
// context alive.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"
#include "proto/shm/layout.h"

namespace moecached {

struct GpuId {
  std::array<std::uint8_t, MOECACHED_UUID_BYTES> uuid{};
  auto operator<=>(const GpuId&) const = default;
};
[[nodiscard]] std::string to_string(const GpuId& id);  // "GPU-01234567-89ab-...", as nvidia-smi prints it
[[nodiscard]] std::optional<GpuId> parse_gpu_id(std::string_view text);  // as to_string() writes it

// Pinned host memory: the CPU writes it, the GPU reads it in place, clients map it read-only.
class GpuHostMemory {
 public:
  virtual ~GpuHostMemory() = default;
  [[nodiscard]] virtual std::span<std::byte> bytes() const = 0;  // a multiple of the granularity
  [[nodiscard]] virtual moecached_host_memory kind() const = 0;
  // A descriptor for one client; close it once it is sent, an open one pins the memory.
  virtual Result<UniqueFd> share() const = 0;
};

// Memory of the daemon, page-locked for copies to and from GPUs as long as this lives.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
};

// A range of device addresses of the daemon, backed chunk by chunk by device memory.
class GpuRange {
 public:
  virtual ~GpuRange() = default;
  [[nodiscard]] virtual std::uint64_t address() const = 0;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;  // of addresses
  // Backs [offset, offset + bytes) with zeroed device memory; both are multiples of the granularity. A fault
  // leaves nothing behind.
  virtual Status grow(std::uint64_t offset, std::uint64_t bytes) = 0;
  [[nodiscard]] virtual std::size_t chunks() const = 0;
  virtual Result<UniqueFd> share(std::size_t chunk) const = 0;  // as GpuHostMemory::share
};

// Device memory of the daemon that a process of the same PID namespace opens by 64 bytes, without being
// handed a descriptor (cudaIpcOpenMemHandle). A holder of the handle can write it. Thread: one at a time.
class GpuIpcBuffer {
 public:
  static constexpr std::size_t kHandleBytes = 64;
  struct Copy {
    std::uint64_t offset = 0;  // in the buffer
    std::uint64_t source = 0;  // device address of this GPU, or address of pinned memory
    std::uint64_t bytes = 0;
    bool from_device = false;
  };
  virtual ~GpuIpcBuffer() = default;
  [[nodiscard]] virtual std::span<const std::byte, kHandleBytes> handle() const = 0;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  // Returns when all bytes are there, for every process. Sources must stay as they are until then.
  virtual Status copy(std::span<const Copy> copies) = 0;
};

// Background work on one GPU, done by a thread of its own. Thread: submit and poll belong to one caller.
class GpuQueue {
 public:
  struct Copy {  // from and to device memory or pinned memory: one range of addresses has both
    std::uint64_t destination = 0;
    const std::byte* source = nullptr;
    std::uint64_t bytes = 0;
  };
  struct Flip {  // an aligned int32 in device memory
    std::uint64_t address = 0;
    std::int32_t value = 0;
  };
  static constexpr std::size_t kCopiesMax = MOECACHED_MAX_PARTS;
  // Copies, or one flip, or a call. Copies of one job and flips are done when reported. Flips are done in
  // order, and so are calls; copies overtake each other.
  struct Job {
    std::uint64_t tag = 0;
    std::uint32_t n_copies = 0;
    Copy copies[kCopiesMax];
    bool is_flip = false;
    Flip flip;
    // Runs on the queue's thread, with the GPU's context: driver calls that may take long. Nothing else
    // moves meanwhile.
    std::function<void()> call;
  };
  struct Done {
    std::uint64_t tag = 0;
    bool ok = true;  // false: the GPU is lost, nothing more will succeed
  };
  virtual ~GpuQueue() = default;
  // REQUIRES: room() > 0.
  virtual void submit(Job job) = 0;
  [[nodiscard]] virtual std::size_t room() const = 0;
  virtual void poll(std::vector<Done>* done) = 0;
  [[nodiscard]] virtual int event_fd() const = 0;           // readable when poll has something
  [[nodiscard]] virtual std::uint64_t copy_ns() const = 0;  // time in which copies were under way; any thread
};

struct GpuMemoryInfo {
  std::uint64_t free = 0, total = 0;
};

class Gpu {
 public:
  virtual ~Gpu() = default;
  [[nodiscard]] virtual const GpuId& id() const = 0;
  [[nodiscard]] virtual const std::string& name() const = 0;  // "NVIDIA H200"
  [[nodiscard]] virtual std::uint64_t granularity() const = 0;
  virtual Result<GpuMemoryInfo> memory_info() = 0;
  virtual Result<std::unique_ptr<GpuHostMemory>> create_host_memory(std::uint64_t bytes) = 0;
  // Lets copies of this GPU read memory that another GPU's create_host_memory has made.
  virtual Status open_host_memory(const GpuHostMemory& memory) = 0;
  // Whole pages of a shared mapping. kSystem: the driver has not pinned it.
  virtual Result<std::unique_ptr<PinnedMemory>> pin(std::span<std::byte> memory) = 0;
  virtual Result<std::unique_ptr<GpuRange>> reserve(std::uint64_t bytes) = 0;
  // Zeroed; a multiple of the granularity. kLimit: there is not as much.
  virtual Result<std::unique_ptr<GpuIpcBuffer>> create_ipc_buffer(std::uint64_t bytes) = 0;
  // Returns when the bytes are there.
  virtual Status write(std::uint64_t address, std::span<const std::byte> source) = 0;
  virtual Result<std::unique_ptr<GpuQueue>> create_queue() = 0;
  // Bytes per second of large copies from pinned memory, measured once.
  virtual Result<double> measure_copy_rate() = 0;
  // -- other GPUs. Whether the driver lets kernels of this one read the other's memory.
  [[nodiscard]] virtual bool can_read(const Gpu& other) const = 0;
  // Bytes per second of large copies from the other's memory, measured. kUnsupported: the driver
  // lets this one not read it.
  virtual Result<double> measure_peer_rate(Gpu& other) = 0;
  // MOECACHED_PROBE_BYTES of the other's memory for clients to try to map, made at the first call: they are
  // its only memory that a daemon takes which serves nothing there. As GpuHostMemory::share.
  virtual Result<UniqueFd> share_probe(const Gpu& other) = 0;
  // Why host memory is a registered memfd and not shareable driver memory; empty if it is the latter.
  [[nodiscard]] virtual std::string host_memory_fallback() const = 0;
};

// The GPUs of this machine, none when there is no driver; `reason` then says why.
[[nodiscard]] std::vector<std::unique_ptr<Gpu>> list_gpus(std::string* reason);

}  // namespace moecached
