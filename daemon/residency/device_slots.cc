#include "daemon/residency/device_slots.h"

#include <algorithm>
#include <functional>

namespace moecached {

void DeviceSlots::open(std::uint32_t n) {
  for (std::uint32_t i = 0; i < n; ++i) {
    free_.emplace_back(kDeviceSlot + n_slots());
    slots_.emplace_back();
  }
  std::ranges::sort(free_, std::greater<>(), &SlotIndex::value);  // the lowest first
  candidates_.reserve(slots_.size());
  policy_->set_slots(n_slots());
}

void DeviceSlots::begin(ExpertIndex rising, SlotIndex from, std::optional<ExpertIndex> falling,
                        std::int32_t spare) {
  CHECK(!is_moving());
  move_ = {.stage = Stage::kCopyingUp,
           .rising = rising,
           .from = from,
           .falling = falling,
           .slot = {},
           .spare = spare};
  if (!falling) {
    move_.slot = free_.back();
    free_.pop_back();
    at(move_.slot) = {.state = SlotState::kFilling, .expert = rising};
    return;
  }
  const auto slot = std::ranges::find_if(slots_, [&](const Slot& each) {
    return each.state == SlotState::kResident && each.expert == *falling;
  });
  CHECK(slot != slots_.end());
  move_.stage = Stage::kEmptying;
  move_.slot = SlotIndex(kDeviceSlot + static_cast<std::uint32_t>(slot - slots_.begin()));
  slot->state = SlotState::kEmptying;
  policy_->on_remove(*falling);
  --n_resident_;
}

void DeviceSlots::put_back(Step step) {
  CHECK(move_.stage == Stage::kEmptying);
  at(move_.slot).state = SlotState::kResident;
  policy_->on_insert(*move_.falling, step);
  ++n_resident_;
  end();
}

void DeviceSlots::copy_up() {
  advance(Stage::kCopyingAside, Stage::kCopyingUp);
  at(move_.slot) = {.state = SlotState::kFilling, .expert = move_.rising};
}

void DeviceSlots::risen(Step step) {
  advance(Stage::kCopyingUp, Stage::kLeaving);
  at(move_.slot).state = SlotState::kResident;
  policy_->on_insert(move_.rising, step);
  ++n_resident_;
}

void DeviceSlots::check(std::span<const std::pair<ExpertIndex, SlotIndex>> residents) const {
  std::vector<std::uint32_t> names_of_slot(slots_.size());
  for (const auto& [expert, slot] : residents) {
    CHECK(slot.value >= kDeviceSlot && slot.value - kDeviceSlot < slots_.size());
    const Slot& at = slots_[slot.value - kDeviceSlot];
    CHECK(at.state == SlotState::kResident && at.expert == expert);
    ++names_of_slot[slot.value - kDeviceSlot];
  }
  for (const SlotIndex slot : free_) {
    CHECK(slot.value >= kDeviceSlot && slot.value - kDeviceSlot < slots_.size());
    CHECK(slots_[slot.value - kDeviceSlot].state == SlotState::kFree);
    ++names_of_slot[slot.value - kDeviceSlot];
  }
  if (is_moving() && move_.stage < Stage::kLeaving) {
    CHECK(move_.slot.value >= kDeviceSlot && move_.slot.value - kDeviceSlot < slots_.size());
    const Slot& at = slots_[move_.slot.value - kDeviceSlot];
    const bool is_filling = move_.stage == Stage::kCopyingUp;
    CHECK(at.state == (is_filling ? SlotState::kFilling : SlotState::kEmptying));
    CHECK(is_filling ? at.expert == move_.rising : move_.falling == at.expert);
    ++names_of_slot[move_.slot.value - kDeviceSlot];
  }
  for (const std::uint32_t names : names_of_slot)
    CHECK(names == 1);  // one owner: an expert, a list, the move
  CHECK(residents.size() == n_resident_);
  CHECK(is_moving() == (move_.spare >= 0));
}

}  // namespace moecached
