// The device slots of one layer: which expert is in which, and the one move between RAM and them that may be
// under way. Of RAM slots it knows nothing but the number of the one that a move empties; LayerTable, whose
// experts these are, decides and commands (rises.cc). Thread: core loop. Memory: grows with open alone.
//
//                begin                copy_up                 risen
//   resident -----------> emptying -----------> filling -----------> resident
//      ^      put_back       |                     ^
//      +---------------------+     free -----------+ begin
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/residency/brain.h"

namespace moecached {

class DeviceSlots {
 public:
  enum class Stage : std::uint8_t {
    kNone,
    kEmptying,      // lanes may be reading the falling expert in the device slot
    kCopyingAside,  // the falling one, to the spare slot
    kCopyingUp,     // the rising one; the falling one is in the spare slot
    kLeaving,       // lanes may be reading the risen one in the RAM slot
    kLanding        // the falling one waits for another RAM slot, or is being copied into one
  };
  struct Move {
    Stage stage = Stage::kNone;
    ExpertIndex rising;
    SlotIndex from;                      // RAM slot of the rising one
    std::optional<ExpertIndex> falling;  // nobody: the device slot was free
    SlotIndex slot;                      // the device slot
    std::int32_t spare = -1;
  };

  [[nodiscard]] std::uint32_t n_slots() const { return static_cast<std::uint32_t>(slots_.size()); }
  [[nodiscard]] std::uint32_t n_resident() const { return n_resident_; }
  [[nodiscard]] bool has_free() const { return !free_.empty(); }

  void set_policy(std::unique_ptr<EvictionPolicy> policy) { policy_ = std::move(policy); }
  [[nodiscard]] EvictionPolicy& policy() { return *policy_; }
  // REQUIRES: a policy is set.
  void open(std::uint32_t n);
  // Whom the policy would have come down, of those that may go.
  template <typename MayGo>
  [[nodiscard]] std::optional<ExpertIndex> choose_victim(MayGo may_go) {
    candidates_.clear();
    for (const Slot& slot : slots_) {
      if (slot.state == SlotState::kResident && may_go(slot.expert)) candidates_.push_back(slot.expert);
    }
    ExpertIndex victim;
    if (policy_->rank(candidates_, {&victim, 1}) == 0) return std::nullopt;
    return victim;
  }

  [[nodiscard]] const Move& move() const { return move_; }
  [[nodiscard]] bool is_moving() const { return move_.stage != Stage::kNone; }
  // In stage kEmptying, or kCopyingUp when nobody has to fall. REQUIRES: none is under way; the falling one
  // is in a device slot, or there is a free one.
  void begin(ExpertIndex rising, SlotIndex from, std::optional<ExpertIndex> falling, std::int32_t spare);
  void put_back(Step step);  // REQUIRES: kEmptying. The move is off.
  void copy_aside() { advance(Stage::kEmptying, Stage::kCopyingAside); }
  void copy_up();
  void risen(Step step);
  void land() { advance(Stage::kLeaving, Stage::kLanding); }
  void end() { move_ = {}; }

  // The move keeps it from eviction, as it has not risen yet.
  [[nodiscard]] bool pins(ExpertIndex expert) const {
    return is_moving() && move_.stage < Stage::kLeaving && move_.rising == expert;
  }
  // The falling one, before it has a RAM slot.
  [[nodiscard]] bool is_falling(ExpertIndex expert) const {
    return is_moving() && move_.stage < Stage::kLeaving && move_.falling == expert;
  }
  // The falling one, whose bytes are in the spare slot: whatever RAM slot it gets is filled from there.
  [[nodiscard]] bool is_landing(ExpertIndex expert) const {
    return move_.stage == Stage::kLanding && move_.falling == expert;
  }

  // `residents`: of whom the table says that they are here. Aborts when the books do not agree.
  void check(std::span<const std::pair<ExpertIndex, SlotIndex>> residents) const;

 private:
  enum class SlotState : std::uint8_t { kFree, kFilling, kResident, kEmptying };
  struct Slot {
    SlotState state = SlotState::kFree;
    ExpertIndex expert;  // resident, leaving, or the one that is going to be
  };
  [[nodiscard]] Slot& at(SlotIndex slot) {
    CHECK(slot.value >= kDeviceSlot && slot.value - kDeviceSlot < slots_.size());
    return slots_[slot.value - kDeviceSlot];
  }
  void advance(Stage from, Stage to) {
    CHECK(move_.stage == from);
    move_.stage = to;
  }

  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Slot> slots_;
  std::vector<SlotIndex> free_;          // used from the back
  std::vector<ExpertIndex> candidates_;  // scratch
  std::uint32_t n_resident_ = 0;
  Move move_;
};

}  // namespace moecached
