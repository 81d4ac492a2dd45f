// Slots in RAM: a pool is a memfd that clients map read-only and SSD reads fill in place. Nothing is
// populated up front, so a pool costs what has been read into it. Pages of unfilled pools are promised all
// the same, and counted before another pool is created.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/platform/device.h"
#include "daemon/platform/memfd.h"
#include "daemon/platform/memory_info.h"

namespace moecached {
namespace {

class HostPool;

// The pools of one device, so that create_pool knows what is promised and not yet used.
struct Ledger {
  std::mutex mutex;
  std::vector<const HostPool*> pools;
};

class HostPool final : public Pool {
 public:
  HostPool(Memfd memory, std::uint64_t bytes_backed_max, std::shared_ptr<Ledger> ledger)
      : memory_(std::move(memory)), bytes_backed_max_(bytes_backed_max), ledger_(std::move(ledger)) {}
  ~HostPool() override {
    const std::lock_guard lock(ledger_->mutex);
    std::erase(ledger_->pools, this);
  }
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  std::uint64_t bytes() const override { return memory_.bytes().size(); }
  std::uint64_t bytes_backed_max() const override { return bytes_backed_max_; }
  int export_fd() const override { return memory_.fd(); }
  std::span<std::byte> host_view() override { return memory_.bytes(); }
  std::uint64_t bytes_backed() const override { return memory_.bytes_backed(); }

  Status write(std::uint64_t offset, std::span<const std::byte> source) override {
    if (Status status = check_range(offset, source.size()); !status) return status;
    if (!source.empty()) std::memcpy(memory_.bytes().data() + offset, source.data(), source.size());
    return ok();
  }

  Status read(std::uint64_t offset, std::span<std::byte> destination) const override {
    if (Status status = check_range(offset, destination.size()); !status) return status;
    return memory_.read(offset, destination);
  }

  Status release(std::uint64_t offset, std::uint64_t n_bytes) override {
    if (Status status = check_range(offset, n_bytes); !status) return status;
    return memory_.release(offset, n_bytes);
  }

  [[nodiscard]] std::uint64_t bytes_promised() const {
    const std::uint64_t backed = bytes_backed();
    return bytes_backed_max_ > backed ? bytes_backed_max_ - backed : 0;
  }

 private:
  [[nodiscard]] Status check_range(std::uint64_t offset, std::uint64_t n_bytes) const {
    if (offset <= bytes() && n_bytes <= bytes() - offset) return ok();
    return Fault{FaultCode::kInvalid, std::to_string(n_bytes) + " bytes at offset " + std::to_string(offset) +
                                          " are not inside a pool of " + std::to_string(bytes()) + " bytes"};
  }

  Memfd memory_;
  const std::uint64_t bytes_backed_max_;
  std::shared_ptr<Ledger> ledger_;
};

class HostDevice final : public Device {
 public:
  std::string_view name() const override { return "host"; }

  Result<std::unique_ptr<Pool>> create_pool(std::string_view label, PoolSize size) override {
    const std::lock_guard lock(ledger_->mutex);
    if (Status status = check_room(label, size.bytes_backed_max); !status) return std::move(status).error();
    Result<Memfd> memory = Memfd::create(
        label, size.bytes,
        size.bytes_backed_max < size.bytes ? ClientAccess::kReadOnlyReleasable : ClientAccess::kReadOnly);
    if (!memory) return std::move(memory).error();
    // Where shmem_enabled is "advise"; elsewhere extents become huge pages as reads reach them
    // (huge_pages.h). Not where slots come and go: a huge page across two of them is memory of both.
    if (size.bytes_backed_max >= size.bytes)
      ::madvise(memory->bytes().data(), memory->bytes().size(), MADV_HUGEPAGE);
    auto pool = std::make_unique<HostPool>(std::move(memory).value(), size.bytes_backed_max, ledger_);
    ledger_->pools.push_back(pool.get());
    return std::unique_ptr<Pool>(std::move(pool));
  }

 private:
  // Shared memory is granted when it is touched, and too much of it ends with the OOM killer: look before.
  [[nodiscard]] Status check_room(std::string_view label, std::uint64_t bytes) const {
    const Result<MemoryInfo> info = read_memory_info();
    if (!info) return ok();  // no /proc: nothing to compare with
    std::uint64_t promised = 0;
    for (const HostPool* pool : ledger_->pools) promised += pool->bytes_promised();
    const std::uint64_t available = info->available_bytes > promised ? info->available_bytes - promised : 0;
    if (bytes <= available) return ok();
    std::string text = "pool \"" + std::string(label) + "\" needs " + bytes_for_people(bytes) + ", and " +
                       bytes_for_people(available) + " are available (" + info->limited_by;
    if (promised > 0) text += ", less " + bytes_for_people(promised) + " promised to other pools";
    text += "); give it fewer slots, stop other users of memory, or raise the limit";
    return Fault{FaultCode::kLimit, std::move(text)};
  }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
};

}  // namespace

std::unique_ptr<Device> make_host_device() { return std::make_unique<HostDevice>(); }

}  // namespace moecached
