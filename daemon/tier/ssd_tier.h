// The SSD tier: reads parts of experts from model files into slots. One thread of its own drives io_uring
// with O_DIRECT; where the kernel or the file system refuses, a pool of pread threads does the same work,
// said once in the log and in stats(). Requests of one submit are issued together; ranges adjacent in the
// file become one read; what is in flight is capped. Threads: submit, poll and the file functions belong to
// one caller thread (the core loop).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/platform/fd.h"
#include "daemon/tier/slot_window.h"

namespace moecached {

using FileId = Index<struct FileTag>;

struct PartRead {
  FileId file;
  std::uint64_t offset = 0;  // bytes
  std::uint64_t bytes = 0;
  std::byte* destination = nullptr;
  // The bytes before and after the destination, up to the direct-I/O alignment, may be overwritten: read in
  // place.
  bool direct = false;
  // Never read in place: the kernel cannot do direct I/O into memory that a driver mapped (EFAULT).
  bool staged = false;
};

inline constexpr std::size_t kMaxPartReads = 8;

struct ReadRequest {
  std::uint64_t tag = 0;
  std::uint32_t n_parts = 0;
  PartRead parts[kMaxPartReads];
};

enum class ReadResult : std::uint8_t { kOk, kIoError, kFileChanged };

struct ReadDone {
  std::uint64_t tag = 0;
  ReadResult result = ReadResult::kOk;
};

enum class SsdEngine : std::uint8_t { kAuto, kIoUring, kPread };

struct SsdOptions {
  SsdEngine engine = SsdEngine::kAuto;
  bool direct = true;                       // try O_DIRECT
  std::uint32_t queue_depth = 32;           // reads in flight, 1..1024
  std::uint64_t max_read_bytes = 1u << 20;  // of one read; larger ranges are split
  std::uint32_t max_requests = 4096;        // accepted and not yet polled
};

struct SsdStats {
  std::string engine;   // "io_uring" or "pread"
  bool direct = false;  // every open file is read with O_DIRECT
  bool registered_buffers = false;
  std::string fallback_reason;  // why not io_uring / not O_DIRECT / not registered; empty if none
  std::uint64_t requests = 0;
  std::uint64_t reads = 0;  // issued to the kernel, after coalescing and splitting
  std::uint64_t bytes_wanted = 0;
  std::uint64_t bytes_read = 0;  // with alignment padding
  std::uint64_t errors = 0;
  std::uint64_t latency_ns_total = 0;  // of requests, submit to done
  std::uint64_t latency_ns_max = 0;
  std::uint32_t depth_max = 0;  // reads in flight at once, highest seen
};

class SsdTier {
 public:
  virtual ~SsdTier() = default;
  // Takes the descriptor (opened read-only by a client or by the daemon) and its identity: device, inode,
  // size and modification time are remembered and compared around reads (kFileChanged).
  virtual Result<FileId> add_file(UniqueFd fd) = 0;
  virtual void remove_file(FileId file) = 0;  // REQUIRES: no request of it is outstanding
  // Direct-I/O alignment to lay records out for: statx(STATX_DIOALIGN), else 4096; 0 when the file is read
  // buffered.
  [[nodiscard]] virtual std::uint32_t direct_alignment(FileId file) const = 0;
  // Memory that reads will go to, registered with io_uring where memlock permits; otherwise nothing happens.
  virtual void register_region(std::span<std::byte> region) = 0;
  // The same for memory whose slots (windows ascending) are given back one by one, of which released() is
  // told: never registered.
  virtual void register_traded_region(std::span<std::byte> region, std::vector<SlotWindow> slots) = 0;
  // REQUIRES: no read goes there.
  virtual void released(std::span<const std::byte> memory) = 0;
  virtual void unregister_region(std::span<std::byte> region) = 0;
  // Returns how many were accepted, in order; fewer than given when max_requests are outstanding.
  [[nodiscard]] virtual std::size_t submit(std::span<const ReadRequest> requests) = 0;
  [[nodiscard]] virtual std::size_t poll(std::span<ReadDone> done) = 0;  // never blocks
  [[nodiscard]] virtual int event_fd() const = 0;                        // readable when poll has something
  [[nodiscard]] virtual SsdStats stats() const = 0;                      // any thread
};

[[nodiscard]] Result<std::unique_ptr<SsdTier>> make_ssd_tier(const SsdOptions& options);

}  // namespace moecached
