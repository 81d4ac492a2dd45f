// A bounded lock-free queue between exactly one producer thread and one consumer thread. Values are pushed
// one by one and become visible together with publish(). Memory: sized at construction, never grows.
//
// publish and empty are sequentially consistent, so that "publish, then look whether the other side sleeps"
// on one side and "say that I sleep, then look whether the ring is empty" on the other cannot both miss.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/base/check.h"

namespace moecached {

template <typename T>
class SpscRing {
 public:
  explicit SpscRing(std::size_t capacity)
      : entries_(std::bit_ceil(std::max<std::size_t>(capacity, 1))), mask_(entries_.size() - 1) {}

  // Producer. REQUIRES: room; whoever uses the ring bounds what is in it.
  void push(const T& value) noexcept {
    DCHECK(next_ - head_.load(std::memory_order_relaxed) < entries_.size());
    entries_[next_ & mask_] = value;
    ++next_;
  }
  void publish() noexcept { tail_.store(next_, std::memory_order_seq_cst); }

  // Consumer.
  [[nodiscard]] bool pop(T& value) noexcept {
    const std::uint64_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_acquire)) return false;
    value = entries_[head & mask_];
    head_.store(head + 1, std::memory_order_release);
    return true;
  }
  [[nodiscard]] bool empty() const noexcept {
    return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_seq_cst);
  }

 private:
  std::vector<T> entries_;
  std::uint64_t mask_;
  alignas(64) std::uint64_t next_ = 0;              // producer's own
  alignas(64) std::atomic<std::uint64_t> tail_{0};  // written by the producer
  alignas(64) std::atomic<std::uint64_t> head_{0};  // written by the consumer
};

}  // namespace moecached
