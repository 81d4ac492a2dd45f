// One recording of a model's routing: the core loop puts what it tells the brain into a bounded buffer, one
// other thread takes it out. What finds no room is counted as dropped; the loop never waits, allocates, locks
// or calls the kernel for it. Not a log: nothing of before the recording is in it. Thread: put() from the
// core loop, take() and taken() from one reader, dropped() from any. Memory: sized at construction.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/base/ids.h"

namespace moecached {

// What one lane routed to in one layer, for one token or for a batch whose tokens cannot be told apart.
struct RoutingEvent {
  std::uint64_t lane = 0;   // session id * lanes + index
  std::uint64_t graph = 0;  // on a GPU: the epoch, which all layers of a graph share; on a CPU 0
  LayerIndex layer;
  std::uint32_t token = 0;  // place in the graph's batch; on a CPU 0
  std::uint32_t n_tokens =
      0;  // on a CPU: the ids are the union of so many, 0: not told; on a GPU: of the batch
  bool prefill = false;
};

class RoutingTap {
 public:
  RoutingTap(ModelId model, std::size_t bytes);

  [[nodiscard]] ModelId model() const noexcept { return model_; }
  void put(const RoutingEvent& event, std::span<const ExpertIndex> experts) noexcept;
  // The oldest event and its experts; false: there is none now.
  [[nodiscard]] bool take(RoutingEvent* event, std::vector<std::uint32_t>* experts);
  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kHeaderWords = 6;
  std::uint64_t& word(std::uint64_t position) noexcept { return words_[position & mask_]; }

  const ModelId model_;
  std::vector<std::uint64_t> words_;  // a power of two; an event is a header and four experts a word
  const std::uint64_t mask_;
  std::uint64_t head_cached_ = 0;                   // reader's
  std::uint64_t tail_cached_ = 0;                   // loop's
  alignas(64) std::atomic<std::uint64_t> head_{0};  // words put
  alignas(64) std::atomic<std::uint64_t> tail_{0};  // words taken
  std::atomic<std::uint64_t> dropped_{0};
};

// Those that are open. Thread: core loop.
class RoutingTaps {
 public:
  static constexpr std::size_t kMax = 4;

  [[nodiscard]] bool is_full() const noexcept { return taps_.size() >= kMax; }
  void open(std::shared_ptr<RoutingTap> tap) { taps_.push_back(std::move(tap)); }
  void close(const std::shared_ptr<RoutingTap>& tap) { std::erase(taps_, tap); }
  void put(ModelId model, const RoutingEvent& event, std::span<const ExpertIndex> experts) noexcept {
    for (const std::shared_ptr<RoutingTap>& tap : taps_) {
      if (tap->model() == model) tap->put(event, experts);
    }
  }

 private:
  std::vector<std::shared_ptr<RoutingTap>> taps_;
};

}  // namespace moecached
