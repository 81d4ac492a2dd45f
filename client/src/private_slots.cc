#include "client/src/private_slots.h"

#include <sys/mman.h>

#include <cerrno>

#include "client/src/error.h"

namespace moecached::client {

PrivateSlots::PrivateSlots(const Geometry& geometry)
    : geometry_(geometry),
      n_touched_(geometry.n_slots_usual),
      slots_(geometry.n_slots),
      slot_of_(geometry.n_experts, kNone) {}

moecached_status PrivateSlots::acquire(std::span<const std::uint16_t> experts, const Read& read,
                                       std::int32_t* slots_out, bool* read_out) {
  const std::lock_guard lock(mutex_);
  moecached_status status = make_writable();
  std::size_t pinned = 0;

  // What is here already is pinned first, lest a victim for one expert be the slot of the next one.
  for (std::size_t i = 0; status == MOECACHED_OK && i < experts.size(); ++i) {
    slots_out[i] = slot_of_[experts[i]];
    read_out[i] = slots_out[i] == kNone;
    if (!read_out[i]) ++slots_[slots_out[i]].pins;
    pinned = i + 1;
  }
  for (std::size_t i = 0; status == MOECACHED_OK && i < experts.size(); ++i) {
    if (!read_out[i]) continue;
    const std::int32_t index = victim();
    if (index == kNone) {
      status = fail(MOECACHED_E_TOO_MANY, "all %u private slots of this layer are in use by other lanes",
                    geometry_.n_slots);
      break;
    }
    Slot& slot = slots_[index];
    if (slot.expert != kNone) slot_of_[slot.expert] = kNone;
    slot.expert = kNone;  // until the read has ended well
    status = read(experts[i], geometry_.window + (geometry_.first_slot + index) * geometry_.slot_stride);
    if (status != MOECACHED_OK) break;
    slot.expert = experts[i];
    slot_of_[experts[i]] = index;
    slots_out[i] = index;
    ++slot.pins;
  }

  for (std::size_t i = 0; i < pinned; ++i) {
    if (slots_out[i] == kNone) continue;  // of a call that failed
    Slot& slot = slots_[slots_out[i]];
    if (status != MOECACHED_OK) {
      --slot.pins;
    } else {
      slot.last_use = ++uses_;
      slots_out[i] += static_cast<std::int32_t>(geometry_.first_slot);
    }
  }
  return status;
}

void PrivateSlots::release(std::span<const std::int32_t> slots) {
  const std::lock_guard lock(mutex_);
  for (const std::int32_t slot : slots) --slots_[slot - static_cast<std::int32_t>(geometry_.first_slot)].pins;
}

// Lazily, because writable private pages count against the commit limit where overcommit is off
// (vm.overcommit_memory = 2), and almost no process ever needs them.
moecached_status PrivateSlots::make_writable() {
  if (writable_) return MOECACHED_OK;
  if (::mprotect(geometry_.window + geometry_.shared_bytes, geometry_.private_bytes,
                 PROT_READ | PROT_WRITE) != 0) {
    return fail(MOECACHED_E_SYSTEM, "no memory for %llu bytes of private slots: %s",
                static_cast<unsigned long long>(geometry_.private_bytes), error_name(errno));
  }
  writable_ = true;
  return MOECACHED_OK;
}

std::int32_t PrivateSlots::victim() {
  std::int32_t oldest = kNone;
  for (std::uint32_t i = 0; i < n_touched_; ++i) {
    if (slots_[i].pins > 0) continue;
    if (oldest == kNone || slots_[i].last_use < slots_[oldest].last_use)
      oldest = static_cast<std::int32_t>(i);
  }
  if (oldest == kNone && n_touched_ < geometry_.n_slots) oldest = static_cast<std::int32_t>(n_touched_++);
  return oldest;
}

}  // namespace moecached::client
