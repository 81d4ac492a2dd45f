#include "daemon/policy/recency_list.h"

namespace moecached {

RecencyList::RecencyList(std::uint32_t n_experts) : nodes_(std::size_t{n_experts} + 1), end_(n_experts) {
  nodes_[end_].prev = end_;
  nodes_[end_].next = end_;
}

void RecencyList::link_after(std::uint32_t at, ExpertIndex expert, Key key) noexcept {
  Node& node = nodes_[expert.value];
  node.key = key;
  node.prev = at;
  node.next = nodes_[at].next;
  nodes_[node.next].prev = expert.value;
  nodes_[at].next = expert.value;
  ++size_;
}

void RecencyList::insert_from_back(ExpertIndex expert, Key key) noexcept {
  CHECK(!contains(expert));
  std::uint32_t at = nodes_[end_].prev;
  while (at != end_ && !before(at, key, expert.value)) at = nodes_[at].prev;
  link_after(at, expert, key);
}

void RecencyList::insert_from_front(ExpertIndex expert, Key key) noexcept {
  CHECK(!contains(expert));
  std::uint32_t at = end_;
  while (nodes_[at].next != end_ && before(nodes_[at].next, key, expert.value)) at = nodes_[at].next;
  link_after(at, expert, key);
}

void RecencyList::erase(ExpertIndex expert) noexcept {
  CHECK(contains(expert));
  Node& node = nodes_[expert.value];
  nodes_[node.prev].next = node.next;
  nodes_[node.next].prev = node.prev;
  node.prev = kOut;
  node.next = kOut;
  --size_;
}

std::size_t RecencyList::append_marked(std::span<const std::uint8_t> marks, std::span<ExpertIndex> out,
                                       std::size_t n_written) const noexcept {
  for (std::uint32_t at = nodes_[end_].next; at != end_ && n_written < out.size(); at = nodes_[at].next) {
    if (marks[at] != 0) out[n_written++] = ExpertIndex(at);
  }
  return n_written;
}

}  // namespace moecached
