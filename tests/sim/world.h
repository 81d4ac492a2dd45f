// What the parts of a simulation share: memory, lanes, the disk queue, chance, and what was seen.
//
// Memory is simulated as what it holds: a slot knows whose bytes it has and which read wrote them, so a lane
// that computes with the wrong ones is caught at the very load. Actions are atomic and in one order; the
// memory fences of the real shell and client are not modelled.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/residency/brain.h"
#include "tests/sim/rng.h"
#include "tests/sim/sim_options.h"
#include "tests/sim/trace.h"

namespace moecached::sim {

enum class ViolationKind : std::uint8_t {
  kNone,
  kWrongBytes,         // a lane read a slot that does not hold what the table said
  kUntruthfulGrant,    // granted, but not resident; failed, but nothing had failed; refused, but it would fit
  kUntruthfulPublish,  // the table would name a slot without the expert's bytes
  kBadCommand,         // does not fit the state of the slot or of the lane
  kStuck,              // not at rest although no fault is pending
  kWrongCount,         // counters differ from what happened
  kOverBudget,         // more slots hold memory than there are
};

struct Violation : std::runtime_error {
  Violation(ViolationKind k, const std::string& text) : std::runtime_error(text), kind(k) {}
  ViolationKind kind;
};

inline void expect(bool condition, ViolationKind kind, const char* text) {
  if (!condition) throw Violation(kind, text);
}

struct SlotBytes {
  bool is_torn = true;  // never written, half written, or its read failed
  ExpertIndex expert;
  std::uint64_t serial = 0;  // of the read that wrote it
  bool is_stray = false;     // found wrong: no entry may name it from then on
};

struct FakeLayer {
  LayerShape shape;
  std::vector<std::int32_t> table;  // as clients see it: slot per expert, or kAbsent
  std::vector<SlotBytes> slots, device_slots;
  // Per slot: the shell waits for its grace period, its read or its copy.
  std::vector<std::uint8_t> busy, device_busy;
  std::vector<std::uint8_t> backed;  // per slot: has memory, as it was read into since it was last given back
  std::uint32_t n_device_max = 0;    // device slots that it may come to have
  std::uint32_t n_open = 0;          // as the shell tells its clients
  std::uint32_t n_open_fewest = 0;   // that it ever had
  bool has_been_held = false;        // for a lane that had stalled
  LayerCounters expected;  // of lookups, hits, misses and leases, where they can be told from outside

  [[nodiscard]] SlotBytes& bytes_at(std::uint32_t slot) {
    return slot < kDeviceSlot ? slots.at(slot) : device_slots.at(slot - kDeviceSlot);
  }
  [[nodiscard]] std::uint8_t& busy_at(std::uint32_t slot) {
    return slot < kDeviceSlot ? busy.at(slot) : device_busy.at(slot - kDeviceSlot);
  }
  [[nodiscard]] bool holds(std::uint32_t slot, ExpertIndex expert) {
    const SlotBytes& bytes = bytes_at(slot);
    return !bytes.is_torn && !bytes.is_stray && bytes.expert == expert;
  }
};

struct FakeModel {
  std::vector<FakeLayer> layers;
  bool is_removed = false;  // the memory stays until the last read into it has ended
  std::map<std::uint32_t, std::uint32_t> n_backed, n_backed_max;  // slots, by slot class
};

constexpr std::int32_t kAbsent = -1;
constexpr std::uint32_t kLayerAll = 0xffff;

struct Stats {
  std::uint64_t epochs = 0, grants = 0, refusals = 0, failed_grants = 0, evictions = 0, reads = 0, waves = 0;
  std::uint64_t deaths_waiting = 0, deaths_mid_epoch = 0, deaths_idle = 0, stalls = 0, closes = 0;
  std::uint64_t read_errors = 0, models_changed = 0, duplicates = 0, late_completions = 0, models_removed = 0;
  std::uint64_t policy_swaps = 0, policies_refused = 0, all_layer_epochs = 0, lies = 0, graces_waited = 0;
  std::uint64_t leases_queued = 0;
  std::uint64_t long_stalls = 0, undone = 0, held = 0, held_whole = 0, held_leases = 0, known_unused = 0,
                refused_by_stall = 0, streamed_prompts = 0;
  std::uint64_t peer_changes = 0;
  std::uint64_t reloads = 0, reloads_pinned = 0, drained = 0;
  std::uint64_t promotions = 0, promotions_evicting = 0, promotions_refused = 0;
  std::uint64_t trades = 0, trades_refused = 0, trades_by_routing = 0, releases = 0, trades_undone = 0;
  std::uint64_t reads_ahead = 0, reads_hastened = 0, prefetch_used = 0, prefetch_late = 0,
                prefetch_wasted = 0, prefetch_regretted = 0;
  std::uint64_t rises = 0, swaps = 0, rises_refused = 0, rises_undone = 0, ram_slots_stalled = 0;
  std::uint64_t falls_elsewhere = 0, falls_given_up = 0, falls_failed = 0, leases_of_falling = 0;
  std::uint64_t device_hits = 0, device_policy_swaps = 0, device_slots_opened = 0, removed_while_rising = 0;
  std::uint64_t wait_ticks_max = 0;  // of an honest lane, from its LEASE record to the answer
};

struct World {
  explicit World(const SimOptions& o) : options(o), rng(o.seed), trace(o.keep_trace_text) {}

  SimOptions options;
  Rng rng;
  Trace trace;
  Stats stats;
  std::uint64_t now = 0;
  bool is_winding_down = false;  // lanes finish what they are at and begin nothing new
  std::map<ModelId, FakeModel> models;

  [[nodiscard]] FakeLayer& layer(ModelId model, LayerIndex index) {
    return models.at(model).layers.at(index.value);
  }
};

}  // namespace moecached::sim
