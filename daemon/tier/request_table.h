// The requests of one SSD tier and how they travel: the caller fills a slot and sends its number to the io
// thread, which works on it in place and sends the number back. A slot belongs to whoever has its number.
// Memory: all of it at construction, so a request allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/tier/spsc_ring.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

struct RequestSlot {
  ReadRequest request;
  std::uint64_t submit_ns = 0;
  // io thread, until the number goes back
  std::uint64_t bytes_left = 0;
  bool failed = false;
  ReadResult result = ReadResult::kOk;
};

struct RequestTable {
  explicit RequestTable(std::uint32_t max_requests)
      : slots(max_requests), to_io(max_requests), to_caller(max_requests) {}
  std::vector<RequestSlot> slots;
  SpscRing<std::uint32_t> to_io;
  SpscRing<std::uint32_t> to_caller;
  std::atomic<bool> io_sleeps{false};         // the io thread takes new requests only after a wake-up
  std::atomic<bool> caller_signalled{false};  // the caller's event is (about to be) readable
};

// Written by the io thread, read by any.
struct TierCounters {
  std::atomic<std::uint64_t> requests{0}, reads{0}, bytes_wanted{0}, bytes_read{0}, errors{0};
  std::atomic<std::uint64_t> latency_ns_total{0}, latency_ns_max{0};
  std::atomic<std::uint32_t> depth_max{0};
  std::atomic<bool> registered_buffers{false};
  std::atomic<std::uint32_t> n_files_buffered{0};  // open ones; written by the caller

  mutable std::mutex reason_mutex;
  std::vector<std::string> reasons;  // distinct, first come first
  void add_reason(const std::string& reason);

  // One writer: no locked instruction is needed.
  template <typename T>
  static void add(std::atomic<T>& counter, T n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  template <typename T>
  static void raise(std::atomic<T>& counter, T n) {
    if (n > counter.load(std::memory_order_relaxed)) counter.store(n, std::memory_order_relaxed);
  }
};

}  // namespace moecached
