// A first-in, first-out list of lanes, linked through an array that the brain owns: a lane waits in at most
// one list at a time, so joining and leaving never allocate. Thread: core loop. Memory: borrows the links.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/base/check.h"
#include "daemon/base/ids.h"

namespace moecached {

struct LaneLink {
  std::uint32_t prev = 0, next = 0;  // meaningful only while the lane is in a list
};

class LaneList {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  [[nodiscard]] bool empty() const { return head_ == kNone; }
  [[nodiscard]] LaneId front() const {
    CHECK(!empty());
    return LaneId(head_);
  }
  // kNone or lane values, for loops that may remove the lane they are at: read the next one first.
  [[nodiscard]] std::uint32_t first() const { return head_; }
  [[nodiscard]] static std::uint32_t next(std::span<const LaneLink> links, std::uint32_t lane) {
    return links[lane].next;
  }

  // REQUIRES: the lane is in no list.
  void push_back(std::span<LaneLink> links, LaneId lane) {
    links[lane.value] = {.prev = tail_, .next = kNone};
    (tail_ == kNone ? head_ : links[tail_].next) = lane.value;
    tail_ = lane.value;
  }
  // REQUIRES: the lane is in no list.
  void push_front(std::span<LaneLink> links, LaneId lane) {
    links[lane.value] = {.prev = kNone, .next = head_};
    (head_ == kNone ? tail_ : links[head_].prev) = lane.value;
    head_ = lane.value;
  }
  // REQUIRES: the lane is in this list.
  void remove(std::span<LaneLink> links, LaneId lane) {
    const LaneLink link = links[lane.value];
    (link.prev == kNone ? head_ : links[link.prev].next) = link.next;
    (link.next == kNone ? tail_ : links[link.next].prev) = link.prev;
  }

 private:
  std::uint32_t head_ = kNone;
  std::uint32_t tail_ = kNone;
};

}  // namespace moecached
