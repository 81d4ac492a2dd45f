// Expert ids of one layer in an intrusive list ordered by (key, id), lowest first: the order, and so every
// victim, does not depend on the order in which the experts of one step were reported. Not a cache: it knows
// no slots and no limits. Thread: core loop. Memory: one node per expert, sized at construction, never grows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/ids.h"

namespace moecached {

class RecencyList {
 public:
  using Key = std::int64_t;

  explicit RecencyList(std::uint32_t n_experts);

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] bool contains(ExpertIndex expert) const noexcept {
    CHECK(expert.value < end_);
    return nodes_[expert.value].next != kOut;
  }
  [[nodiscard]] ExpertIndex front() const noexcept {
    CHECK(size_ != 0);
    return ExpertIndex(nodes_[end_].next);
  }

  // Walks from the lowest to the highest; kEnd behind the last. REQUIRES of next: the expert is in the list.
  static constexpr ExpertIndex kEnd{UINT32_MAX};
  [[nodiscard]] ExpertIndex first() const noexcept { return named(nodes_[end_].next); }
  [[nodiscard]] ExpertIndex next(ExpertIndex expert) const noexcept {
    CHECK(contains(expert));
    return named(nodes_[expert.value].next);
  }

  // Both put the expert where (key, id) belongs; they differ in the end that the search starts from, so that
  // the usual key of each caller costs a few comparisons. REQUIRES: the expert is not in the list.
  void insert_from_back(ExpertIndex expert, Key key) noexcept;   // for keys that are newer than most
  void insert_from_front(ExpertIndex expert, Key key) noexcept;  // for keys that are older than most
  // REQUIRES: the expert is in the list.
  void erase(ExpertIndex expert) noexcept;

  // Appends the experts whose mark is not 0 to out[n_written...], lowest first, until `out` is full; returns
  // the new count.
  [[nodiscard]] std::size_t append_marked(std::span<const std::uint8_t> marks, std::span<ExpertIndex> out,
                                          std::size_t n_written) const noexcept;

 private:
  static constexpr std::uint32_t kOut = UINT32_MAX;
  struct Node {
    Key key = 0;
    std::uint32_t prev = kOut;
    std::uint32_t next = kOut;
  };
  [[nodiscard]] bool before(std::uint32_t node, Key key, std::uint32_t id) const noexcept {
    return nodes_[node].key != key ? nodes_[node].key < key : node < id;
  }
  [[nodiscard]] ExpertIndex named(std::uint32_t node) const noexcept {
    return node == end_ ? kEnd : ExpertIndex(node);
  }
  void link_after(std::uint32_t at, ExpertIndex expert, Key key) noexcept;

  std::vector<Node> nodes_;  // [end_] closes the ring: its next is the first, its prev the last
  std::uint32_t end_;
  std::uint32_t size_ = 0;
};

}  // namespace moecached
