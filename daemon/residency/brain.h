// The residency brain: which expert is in which slot of which layer, who leases it, what is read next. Pure:
// events in, commands out; no clock, no system call, no thread, no fence. The simulator and the daemon run
// this same code.
//
// One slot: free -> loading -> resident -> evicting -> loading ...   or, closed: resident -> closing ->
// closed
//   kUnpublish  the shell sets the slot table entry to absent, then waits until no lane can still use the
//   slot
//               (grace period), then calls grace_done
//   kRead       the shell reads the expert into the slot, then calls read_done
//   kHasten     somebody waits now for a read that was commanded as one that nobody waits for
//   kPublish    the shell sets the entry to the slot
//   kRelease    the slot is closed: the shell gives its memory back, before what the commands behind it begin
//   kGrant      everything a lease asked for is resident and stays so until the lane's epoch is completed
//
// Above the RAM slots of a layer there may be device slots: an expert is in one of either, or on disk. What
// is read comes into RAM; of what decode uses, rise() moves the best up. Who is in the device slot that it
// needs, the falling one, comes down into the RAM slot that the rising one leaves, through a spare slot of
// the shell's:
//   falling  kUnpublish; grace period of the device slot; kCopyAside, moved
//   rising   kCopyUp, moved; kMove; grace period of the RAM slot
//   falling  kRead from the spare slot, read_done, kPublish; kSpareFreed
// The rising one is resident all the time. The falling one is coming, as if it were being read: leases that
// name it wait for copies and grace periods, never for another lease.
//   kCopyUp     the shell copies the expert from RAM slot `from` to the device slot, then calls moved
//   kCopyAside  the shell copies the expert from the device slot to `spare`, then calls moved
//   kMove       the shell sets the entry, which names `from`, to the device slot, waits for the grace period
//               of `from`, which this expert is leaving, then calls grace_done for it
//   kSpareFreed nothing is in `spare` any more: the shell may lend it again
//
// No deadlock: a lease is granted whole or holds nothing; each layer serves its queue in order; a lane has at
// most one lease. A layer has room for n_slots_max slots, of which some are open; layers of one slot class
// may trade them, so that their sum stays what it is. Thread: core loop. Memory: sized by add_model and
// lane_opened.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/base/slot_scope.h"
#include "daemon/policy/eviction_policy.h"

namespace moecached {

class PolicyLibraries;

struct LayerShape {
  std::uint32_t n_experts = 0;
  std::uint32_t n_slots = 0;      // open at first: 1..n_slots_max
  std::uint32_t n_slots_max = 0;  // there are addresses for, at most n_experts; 0: n_slots
  std::uint32_t slot_class = 0;   // layers of one class may trade slots
  [[nodiscard]] std::uint32_t room() const { return n_slots_max == 0 ? n_slots : n_slots_max; }
};

// Device slots of a layer are numbered from here on, in its slot table, in commands and in events.
inline constexpr std::uint32_t kDeviceSlot = 1u << 20;

// Addresses for the slots of a layer that begins with n_slots: all that it may come to have.
[[nodiscard]] constexpr std::uint32_t slot_room(SlotScope scope, std::uint32_t n_slots,
                                                std::uint32_t n_experts) {
  if (scope == SlotScope::kLayer) return n_slots;
  return std::min(2 * n_slots, n_experts);
}

// When prefetching tries, and when it gives up for a while (prefetch_switch.h). In tokens of one lane: events
// of each layer.
struct PrefetchPace {
  std::uint32_t learn_tokens = 128;
  std::uint32_t window = 128;  // prefetches that are judged together
  std::uint32_t pause_tokens_min = 1024, pause_tokens_max = 1u << 16;
};

struct ModelShape {
  std::vector<LayerShape> layers;
  std::string policy = "slru";
  SlotScope scope = SlotScope::kLayer;
  std::uint32_t n_expert_used = 0;  // top-k: trades leave a layer slots for two tokens, if it had them
  bool prefetch = false;            // of experts that decode is likely to use next (prefetch.h)
  PrefetchPace prefetch_pace = {};
  std::string device_policy = "ewma";  // which experts are in device slots, once there are some
};

enum class ReadOutcome : std::uint8_t { kOk, kIoError, kModelChanged };
enum class GrantStatus : std::uint8_t {  // = moecached_grant_status
  kOk = 0,
  kIoError = 1,
  kModelChanged = 2,
  kRefused = 3,  // more experts than slots, those in device slots not counted
  kNoRoom = 4    // stalled lanes, or for a prompt decode, keep too many slots of the layer
};

// What experts were used for. A prompt batch uses most experts once, which says little about what comes next:
// it takes free slots and those of other prompts, but never one that decode uses, and no policy learns from
// it.
enum class Phase : std::uint8_t { kDecode, kPrompt };

enum class CommandKind : std::uint8_t {
  kUnpublish,
  kRead,
  kHasten,
  kPublish,
  kGrant,
  kRelease,
  kCopyUp,
  kCopyAside,
  kMove,
  kSpareFreed
};

struct Command {
  CommandKind kind = CommandKind::kRead;
  GrantStatus status = GrantStatus::kOk;  // kGrant
  ModelId model;
  LayerIndex layer;       // all but kGrant
  ExpertIndex expert;     // all but kGrant, kRelease and kSpareFreed
  SlotIndex slot;         // all but kGrant and kSpareFreed
  SlotIndex from;         // kCopyUp, kMove: the RAM slot
  bool is_ahead = false;  // kRead: nobody waits for it yet, so it goes behind what somebody waits for
  LaneId lane;            // kGrant
  std::uint32_t seq = 0;  // kGrant
  // kCopyAside, kSpareFreed; kRead: where the bytes are, -1: on disk.
  std::int32_t spare = -1;
};

// What an undone eviction takes back: `leaving` was to make room in the slot, or the slot to be closed. Of a
// kMove, slot is `from`.
struct Eviction {
  ModelId model;
  LayerIndex layer;
  SlotIndex slot;
  ExpertIndex leaving;
};

struct LayerCounters {
  std::uint64_t lookups = 0;      // expert ids of routed and lease events
  std::uint64_t hits = 0;         // of those, resident when the event was handled
  std::uint64_t device_hits = 0;  // of those, in device slots
  std::uint64_t misses = 0;       // lookups - hits
  std::uint64_t insertions = 0;   // reads from disk that became resident
  std::uint64_t evictions = 0;    // after which the expert is on disk alone
  std::uint64_t rises = 0;        // experts that moved from RAM to a device slot
  std::uint64_t swaps = 0;        // of those, for which another came down
  std::uint64_t read_failures = 0;
  std::uint64_t leases = 0;
  std::uint64_t leases_queued = 0;  // of those, could not start at once
  std::uint64_t prefetched = 0;     // loads started because decode was expected to use the expert
  // What became of them; the others are not used yet.
  std::uint64_t prefetch_used = 0;       // resident when decode first used the expert: a miss less
  std::uint64_t prefetch_late = 0;       // under way then: a miss that waits less
  std::uint64_t prefetch_wasted = 0;     // evicted unused, or not read
  std::uint64_t prefetch_regretted = 0;  // misses of what had to go for one that was not used
};

// Whether a model prefetches: it learns, tries for a while, and pauses where that does not pay.
enum class PrefetchState : std::uint8_t { kOff, kLearning, kProbing, kOn, kPaused };
[[nodiscard]] const char* name_of(PrefetchState state);  // "off", "learning", ...

class Brain {
 public:
  // libraries: of policies, borrowed; nullptr: there are none.
  explicit Brain(const PolicyLibraries* libraries = nullptr);
  ~Brain();
  Brain(const Brain&) = delete;
  Brain& operator=(const Brain&) = delete;

  // -- configuration. kInvalid: bad shape or policy; nothing was changed.
  Status add_model(ModelId model, const ModelShape& shape);
  // REQUIRES: no lane of the model is open. Reads in flight are still reported with read_done and ignored
  // then.
  void remove_model(ModelId model);
  // What is resident stays; the new policy starts from the access history, which outlives every policy.
  // Of several models: all or none. kInvalid: the old ones stay.
  Status set_policy(ModelId model, const std::string& spec) { return set_policy(std::span(&model, 1), spec); }
  Status set_policy(std::span<const ModelId> models, const std::string& spec);

  // The same of the policies of device slots.
  Status set_device_policy(std::span<const ModelId> models, const std::string& spec);

  // How much each expert is used, by layer, from what was seen in an earlier life: the policy starts from it
  // as from a history of its own. kNotFound.
  Status seed(ModelId model, std::span<const std::vector<double>> uses_per_step);

  // The same model on other GPUs, whose slots lanes of this one can read: a use that such a slot serves costs
  // `cost` of one that none serves (0..1). Promotions spread experts over the peers then, all but those that
  // are used so much that a copy of their own pays; decode of `model` counts for the experts of its peers as
  // well. Replaces what was said before. REQUIRES: layers are alike.
  void set_peers(ModelId model, std::span<const ModelId> peers, double cost);

  // -- events
  void lane_opened(LaneId lane, ModelId model);
  void lane_closed(LaneId lane);  // drops its lease and its place in the queue
  // The lane used these experts, all resident as it saw the table. Ids are distinct within one call and in
  // range.
  void routed(LaneId lane, LayerIndex layer, std::span<const ExpertIndex> experts,
              Phase phase = Phase::kDecode);
  // The lane needs these distinct experts and will use them in `epoch`. Replaces an older lease of the lane.
  // That of a prompt never queues: it starts, or is told to stream.
  void lease(LaneId lane, LayerIndex layer, std::span<const ExpertIndex> experts, std::uint32_t seq,
             std::uint64_t epoch, Phase phase = Phase::kDecode);
  void epoch_completed(LaneId lane, std::uint64_t completed);  // releases a lease with epoch <= completed
  // Where misses are read in place nobody leases: the shell asks what a promotion would gain (uses per step;
  // infinite into a free slot) and starts those that are worth their upload. 0, false: no room, or a lease
  // waits for slots of the layer. What only a prompt used is worth a free slot, and nobody else's.
  [[nodiscard]] double promotion_gain(ModelId model, LayerIndex layer, ExpertIndex expert,
                                      Phase phase = Phase::kDecode);
  bool promote(ModelId model, LayerIndex layer, ExpertIndex expert, Phase phase = Phase::kDecode);
  // What loads of this layer cost now, for policies that weigh it; a policy that comes later is told as well.
  void set_costs(ModelId model, LayerIndex layer, const PolicyCosts& costs);
  void grace_done(ModelId model, LayerIndex layer, SlotIndex slot);
  // The bytes of a resident expert are not the file's: somebody wrote into its slot. kReading: its entry goes
  // (kUnpublish), and behind the grace period it is read again. kPinned: a lease or a hold keeps it; to be
  // told again when that may have changed. kGone: it is not in that slot any more.
  enum class Reload : std::uint8_t { kReading, kPinned, kGone };
  Reload slot_corrupt(ModelId model, LayerIndex layer, SlotIndex slot, ExpertIndex expert);

  // -- slots of a layer become more or fewer.
  // More, for which the shell has memory: at most as many as there is room for. Returns how many.
  std::uint32_t open_slots(ModelId model, LayerIndex layer, std::uint32_t n);
  // One slot less of one layer; once its memory is given back (kRelease), one more of the other. False, and
  // nothing changes: they are of different classes, `to` has no room, or `from` cannot spare one now: it
  // would have fewer than two tokens need (or it began with), leases wait in it or would not fit any more,
  // all is pinned, or a slot of it is closing already. An eviction that is undone undoes the whole.
  bool move_slot(ModelId model, LayerIndex from, LayerIndex to);
  // Of a model whose scope is global: moves a slot where the routing seen says that it is worth it
  // (slot_trader.h), at most one. To be asked behind an event with misses in layer `busy`, which gives none:
  // its experts are on their way. False: no trade.
  bool trade_slots(ModelId model, LayerIndex busy);

  // More device slots, for which the shell has memory; at first a layer has none. REQUIRES: at most one per
  // expert; nothing of the model is traded (scope layer), and it has no peers.
  void open_device_slots(ModelId model, LayerIndex layer, std::uint32_t n);

  // Of a model whose scope is global: how many slots each layer should have, when `even` is the same share of
  // all and memory can only be added (slot_trader.h). Empty: there is no such model.
  [[nodiscard]] std::vector<std::uint32_t> share_out(ModelId model,
                                                     std::span<const std::uint32_t> even) const;

  // -- device slots.
  // Begins to move up what is worth it most: of those that decode has just `used`, the expert in RAM that
  // gains the most over the one that the policy would have come down, if that is more than gain_min (uses per
  // step); into a free device slot, the one that is used most, whatever the gain. `spare`: a slot's worth of
  // device memory, lent until kSpareFreed, which comes once unless the model is removed. False, and nothing
  // is lent: nothing is worth it or may be moved, a move is under way in this layer, or leases wait in it.
  bool rise(ModelId model, LayerIndex layer, std::span<const ExpertIndex> used, double gain_min,
            std::uint32_t spare);
  // The copy that kCopyUp or kCopyAside asked for is done. To be reported once: it does not say which.
  void moved(ModelId model, LayerIndex layer, SlotIndex slot);

  // -- events of lanes that do not move (a stopped process). Others must neither take what such a lane may be
  // using nor wait for it: what it holds counts as slots that the layer does not have, until epoch_completed.
  // A lease that does not fit beside it is answered with kNoRoom, at once; one that does waits for the
  // others.
  //
  // The lane has stalled in `epoch` and may be using these: those resident are kept. Adds to earlier holds.
  void hold(LaneId lane, LayerIndex layer, std::span<const ExpertIndex> experts, std::uint64_t epoch);
  // The same for what its granted lease names. REQUIRES: blocks_others.
  void hold_lease(LaneId lane);
  // Instead of grace_done, when the lane has stalled in `epoch` and may use the slot: the old expert goes
  // back (kPublish) and is held, the one that was to come gets another slot, or the leases that wait for it
  // queue again. Returns false when the grace period goes on, at the first time and later: the slot is not being
  // emptied, or the old expert is on its way elsewhere. Only in two such cases something changes: the old
  // expert is the one that was to come (slot_corrupt): it is absent, whoever waits for it queues again, and
  // the layer is without the slot until grace_done. Or the slot is the RAM slot that a risen expert has left
  // (kMove): nothing can go back, the slot is out of service until grace_done, and a falling expert that was
  // to come there gets another slot, or is given up and its leases queue again.
  // Of a device slot the falling expert goes back and the move is off.
  bool undo_eviction(const Eviction& eviction, LaneId lane, std::uint64_t epoch);
  // Where nobody leases: the old expert goes back, the newcomer gets no other slot.
  bool cancel_eviction(const Eviction& eviction);

  void read_done(ModelId model, LayerIndex layer, SlotIndex slot, ReadOutcome outcome);

  // -- commands of the events so far, oldest first; the span is valid until the next event. Clears them.
  [[nodiscard]] std::span<const Command> take_commands();

  // -- views
  // A granted lease or a hold, not yet released; of several, the epoch that ends first.
  [[nodiscard]] bool has_lease_until(LaneId lane, std::uint64_t* epoch) const;
  // Its granted lease keeps slots of a layer in which leases wait, and is not held yet.
  [[nodiscard]] bool blocks_others(LaneId lane) const;
  [[nodiscard]] std::span<const LayerCounters> counters(ModelId model) const;          // one per layer
  [[nodiscard]] std::uint32_t resident(ModelId model, LayerIndex layer) const;         // RAM slots
  [[nodiscard]] std::uint32_t device_resident(ModelId model, LayerIndex layer) const;  // device slots
  [[nodiscard]] std::uint32_t device_slots(ModelId model, LayerIndex layer) const;     // open now
  [[nodiscard]] bool is_rising(ModelId model, LayerIndex layer) const;                 // a move is under way
  [[nodiscard]] std::uint32_t free_slots(ModelId model, LayerIndex layer) const;
  [[nodiscard]] std::uint32_t slots(ModelId model, LayerIndex layer) const;  // open now
  [[nodiscard]] bool is_absent(ModelId model, LayerIndex layer, ExpertIndex expert) const;
  [[nodiscard]] bool is_resident(ModelId model, LayerIndex layer, ExpertIndex expert) const;
  // Where it is resident: a RAM slot or a device slot.
  [[nodiscard]] std::optional<SlotIndex> slot_of(ModelId model, LayerIndex layer, ExpertIndex expert) const;
  // A peer has it, or will.
  [[nodiscard]] bool is_elsewhere(ModelId model, LayerIndex layer, ExpertIndex expert) const;
  [[nodiscard]] std::vector<std::vector<double>> use_rates(ModelId model) const;  // the history, for seed()
  [[nodiscard]] std::uint32_t coming(ModelId model) const;  // experts that wait for a slot or are being read
  [[nodiscard]] std::string policy(ModelId model) const;
  [[nodiscard]] std::string device_policy(ModelId model) const;
  [[nodiscard]] PrefetchState prefetch(ModelId model) const;
  // Aborts (CHECK) when the books do not agree: used by tests and the simulator after every event.
  void check_invariants() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moecached
