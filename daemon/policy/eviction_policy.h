// Ranks the resident experts of one layer by how cheaply each can be lost. A policy never frees memory, takes
// leases or starts I/O; residency/ does, and may skip a victim. Thread: core loop. Memory: sized at
// construction, never grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "daemon/base/ids.h"

namespace moecached {

// Counts events of one layer: each routed token set is one step. Experts of one step count as simultaneous.
using Step = std::uint64_t;

// What was seen of an expert before the policy's first event.
struct PastUse {
  double uses_per_step = 0;  // 0..1, newer steps weighing more
  Step last_step = 0;        // 0: never used
};

// What the loads of one layer's experts cost now, as measured.
struct PolicyCosts {
  double miss_ns = 1;    // one use of an absent expert: read in place, or loaded while a client waits
  double upload_ns = 1;  // one expert's copy on the link, were it idle
  double link_busy = 1;  // 0..1: share of time in which the link serves misses, which an upload holds up
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  // `expert` became resident because of step `step`. REQUIRES: it is not resident.
  virtual void on_insert(ExpertIndex expert, Step step) noexcept = 0;
  // A resident expert was used. REQUIRES: it is resident. Several calls with one step are one event.
  virtual void on_access(ExpertIndex expert, Step step) noexcept = 0;
  // An expert that is not resident was used; reported before the insertion that it may lead to. Policies that
  // know nothing of absent experts ignore it.
  virtual void on_miss(ExpertIndex /*expert*/, Step /*step*/) noexcept {}
  // Warm start, before the first event: one entry per expert, as of step `now`. Events of older steps that
  // follow are part of what is told here. Policies that keep no scores ignore it.
  virtual void seed(std::span<const PastUse> /*past*/, Step /*now*/) noexcept {}
  // The layer has so many slots from now on (1..n_experts), which residency/ may change between two events.
  // Policies with parts that are shares of the slots follow; others ignore it.
  virtual void set_slots(std::uint32_t /*n_slots*/) noexcept {}
  // May be told at any time; policies that weigh no costs ignore it.
  virtual void set_costs(const PolicyCosts& /*costs*/) noexcept {}
  // A resident expert was removed, by rank's choice or another reason. REQUIRES: it is resident.
  virtual void on_remove(ExpertIndex expert) noexcept = 0;

  // Writes victims, best first, and returns how many: min(candidates, victims_out), each at most once.
  // REQUIRES: every candidate is resident, distinct and unleased.
  [[nodiscard]] virtual std::size_t rank(std::span<const ExpertIndex> candidates,
                                         std::span<ExpertIndex> victims_out) noexcept = 0;

  // What is gained, in uses per step, by the absent `newcomer` in place of the resident `victim`; nothing or
  // less: leave it. Asked where a miss need not be followed by an insertion (covered mode, where it is read
  // in place). Policies without an estimate say 1: every miss is worth it.
  [[nodiscard]] virtual double gain(ExpertIndex /*newcomer*/, ExpertIndex /*victim*/) const noexcept {
    return 1;
  }
};

}  // namespace moecached
