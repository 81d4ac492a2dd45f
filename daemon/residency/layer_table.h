// The books of one layer: which slot holds which expert, what is on its way, and how many leases pin each
// expert. It knows no lanes and no queues (brain.cc does) and does nothing itself: what the shell has to do
// is appended to the command list. Thread: core loop. Memory: sized at construction; only admit and the
// completions append commands.
//
// (undo_eviction: evicting or closing -> resident again, with the old expert. reload: resident -> evicting,
// for the same expert; undone, its slot is draining: nobody's until the lanes that read it are done, then
// free)
//          admit                     read_done kOk
//   free ------------> loading ----------------------> resident
//   ^ ^                 |  ^                            |    |
//   | +-----------------+  |  grace_done                |    | admit, chosen by the policy
//   |    read failed       +------------ evicting <-----|----+
//   | open                                              | close, chosen by the policy
//   closed <---- close, of a free one;  <---- closing <-+
//                                  grace_done
// A closed slot is an address without memory. Closing ones are no slots of the layer any more, but still hold
// theirs.
//
// These are the slots in RAM. Of an expert that moves up into a device slot (device_slots.h, rises.cc):
//               moved              grace_done
//   resident ----------> leaving --+--------> free
//                              |   +--------> loading, when another one falls for it
//                              | undo_eviction   grace_done
//                              +--------> stalled ----------> free
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/use_rates.h"
#include "daemon/residency/brain.h"
#include "daemon/residency/device_slots.h"

namespace moecached {

class LayerTable {
 public:
  struct Place {
    ModelId model;
    LayerIndex layer;
  };

  // `counters` must outlive the table. REQUIRES: 1 <= n_slots <= n_slots_max <= n_experts.
  LayerTable(Place place, LayerShape shape, std::unique_ptr<EvictionPolicy> policy, LayerCounters& counters);

  [[nodiscard]] std::uint32_t n_slots() const { return n_open_; }  // open
  [[nodiscard]] std::uint32_t n_slots_max() const { return static_cast<std::uint32_t>(slots_.size()); }
  [[nodiscard]] std::uint32_t n_closing() const { return n_closing_; }
  [[nodiscard]] std::uint32_t n_draining() const { return n_draining_; }
  [[nodiscard]] std::uint32_t n_held() const { return n_held_; }  // experts in RAM slots
  [[nodiscard]] std::uint32_t n_experts() const { return static_cast<std::uint32_t>(experts_.size()); }
  [[nodiscard]] std::uint32_t n_resident() const { return n_resident_; }
  [[nodiscard]] std::uint32_t n_coming() const {
    return n_open_ - static_cast<std::uint32_t>(free_.size()) - n_resident_ - n_vacant();
  }
  [[nodiscard]] const DeviceSlots& device() const { return device_; }
  // Of the set, those that cannot do without a RAM slot.
  [[nodiscard]] std::uint32_t count_in_ram(std::span<const ExpertIndex> experts) const;
  // RAM slots that the set fills once nothing moves: a rising and a falling expert share one.
  [[nodiscard]] std::uint32_t count_ram_slots(std::span<const ExpertIndex> experts) const;
  [[nodiscard]] bool is_resident(ExpertIndex expert) const {
    return at(expert).state == ExpertState::kResident;
  }
  [[nodiscard]] std::uint32_t count_absent(std::span<const ExpertIndex> experts) const;  // not resident yet

  // One event: counts lookups, hits and misses; of decode, tells policy and history. Returns the step of the
  // event; prompts have none of their own.
  Step touch(std::span<const ExpertIndex> experts, Phase phase = Phase::kDecode);

  // The same uses, of lanes that may read this layer's slots from another GPU: they count as a reason to keep
  // an expert, not as this model's lookups.
  void observe(std::span<const ExpertIndex> experts);

  // The same layer on other GPUs, whose slots this one's lanes can read: a use that is served there costs
  // `cost` of one that is served by nobody (0..1). Outlived by the caller's next call.
  void set_peers(std::vector<const LayerTable*> peers, double cost);
  // A peer has the expert, or will.
  [[nodiscard]] bool is_elsewhere(ExpertIndex expert) const;

  // Whether every expert of the set has a slot or can be given one now, without taking a pinned one; for a
  // prompt, nor one that decode uses.
  [[nodiscard]] bool can_admit(std::span<const ExpertIndex> experts, Phase phase = Phase::kDecode) const;
  // Pins the set and starts what has to be loaded for it. REQUIRES: can_admit, distinct experts.
  void admit(std::span<const ExpertIndex> experts, Step step, std::vector<Command>& commands,
             Phase phase = Phase::kDecode);
  // REQUIRES: each was pinned by an admit and not yet unpinned for it.
  void unpin(std::span<const ExpertIndex> experts);

  // A pin that is not waited for: the slot of a held expert counts as missing. REQUIRES: resident.
  void hold(ExpertIndex expert);
  void release(ExpertIndex expert);  // REQUIRES: held
  // Whether the set could be admitted if all pins but the held ones were released; with so many slots fewer.
  [[nodiscard]] bool fits_beside_held(std::span<const ExpertIndex> experts, std::uint32_t n_fewer = 0) const;

  // Closed slots become free ones. REQUIRES: there are as many.
  void open_slots(std::uint32_t n);
  // Closes a free slot at once (kRelease), or evicts the policy's choice, whose slot is closed by grace_done.
  enum class Close : std::uint8_t { kNoRoom, kClosing, kClosed };
  Close close_slot(std::vector<Command>& commands);

  // What the policy expects of loading an absent expert now: infinite while there are free slots, 0 when it
  // is not absent or nothing can make room. One that is elsewhere gains what reading it there costs.
  [[nodiscard]] double promotion_gain(ExpertIndex expert, Phase phase = Phase::kDecode);
  // Starts loading an absent expert that nobody waits for. False: no room.
  bool promote(ExpertIndex expert, std::vector<Command>& commands, Phase phase = Phase::kDecode);
  // The same for one that decode is expected to use in its next step here, as likely as `likelihood` says of
  // each expert. Takes a free slot, or that of an expert which is half as likely at most. False: neither.
  bool prefetch(ExpertIndex expert, std::span<const float> likelihood, std::vector<Command>& commands);
  [[nodiscard]] std::uint32_t n_free() const { return static_cast<std::uint32_t>(free_.size()); }
  [[nodiscard]] bool is_absent(ExpertIndex expert) const { return at(expert).state == ExpertState::kAbsent; }

  [[nodiscard]] bool is_in(SlotIndex slot, ExpertIndex expert) const {
    return is_resident(expert) && at(expert).slot == slot;
  }
  // Evicts an expert whose bytes are not right any more, to read it into the same slot again. False: it is
  // pinned. REQUIRES: is_in, a RAM slot.
  bool reload(SlotIndex slot, ExpertIndex expert, std::vector<Command>& commands);

  // kNothing also when the slot does not wait for it: a late or doubled event.
  enum class Grace : std::uint8_t { kNothing, kClosed, kFreed };
  Grace grace_done(SlotIndex slot, std::vector<Command>& commands);
  // Puts the old expert back into a slot that is being emptied. kNoRoom: the expert that was to come has no
  // slot now; its pins are for the caller to release. move_coming false: it is not looked for one. kKept:
  // none was to come, the slot was to be closed and stays open. kPutBack: it was waited for like a load.
  // kStalled, kStalledNoRoom: it has risen, its RAM slot is out of service. kDraining: the old expert's bytes
  // are wrong, so it is absent, its pins are for the caller to release, and the layer has a slot less until
  // grace_done.
  enum class Undo : std::uint8_t {
    kIgnored,
    kMoved,
    kNoRoom,
    kKept,
    kPutBack,
    kStalled,
    kStalledNoRoom,
    kDraining
  };
  Undo undo_eviction(SlotIndex slot, ExpertIndex old_expert, bool move_coming, ExpertIndex* coming,
                     std::vector<Command>& commands);
  // The expert whose read ended; nothing when the slot was not loading.
  std::optional<ExpertIndex> read_done(SlotIndex slot, ReadOutcome outcome, std::vector<Command>& commands);

  // Device slots, see Brain.
  void open_device_slots(std::uint32_t n);
  bool rise(std::span<const ExpertIndex> used, double gain_min, std::int32_t spare,
            std::vector<Command>& commands);
  void moved(SlotIndex slot, std::vector<Command>& commands);
  [[nodiscard]] std::optional<SlotIndex> slot_of(ExpertIndex expert) const;
  void replace_device_policy(std::unique_ptr<EvictionPolicy> policy);

  // The new policy is seeded with the history of every expert, then told of the residents' insertions and of
  // everybody's last use, oldest first.
  void replace_policy(std::unique_ptr<EvictionPolicy> policy);
  void set_costs(const PolicyCosts& costs);
  // Uses per step that are known from elsewhere, by expert: where they are higher than the history says. The
  // policy learns of them when it is replaced.
  void seed_history(std::span<const double> uses_per_step);
  [[nodiscard]] std::vector<double> use_rates() const;

  // One count per expert, from leases and holds. Aborts when the books do not agree.
  struct Pins {
    std::vector<std::uint32_t> all, held;  // held ones are in both
  };
  void check(const Pins& expected) const;

 private:
  static constexpr ExpertIndex kNobody{UINT32_MAX};
  enum class SlotState : std::uint8_t {
    kFree,
    kLoading,
    kResident,
    kEvicting,
    kDraining,
    kClosing,
    kClosed,
    kLeaving,
    kStalled
  };
  enum class ExpertState : std::uint8_t { kAbsent, kComing, kResident };
  struct Slot {
    SlotState state = SlotState::kFree;
    ExpertIndex expert;     // resident, or the one that is going to be; kLeaving: kNobody, or the falling one
    Step step = 0;          // of the lease that made it load
    bool is_ahead = false;  // kLoading: read as one that nobody waits for
  };
  struct Expert {
    ExpertState state = ExpertState::kAbsent;
    SlotIndex slot;  // valid unless kAbsent; of one that falls its device slot, until it has one in RAM
    std::uint32_t pins = 0;
    std::uint32_t holds = 0;  // of the pins
    Step inserted_step = 0, last_step = 0;
    bool is_prompts = false;             // loaded for a prompt, and not used by decode since
    bool is_ahead = false;               // prefetched, and not used by decode since
    ExpertIndex displaced_by = kNobody;  // of an absent one that a prefetch evicted
  };

  [[nodiscard]] Expert& at(ExpertIndex expert) {
    CHECK(expert.value < experts_.size());
    return experts_[expert.value];
  }
  [[nodiscard]] const Expert& at(ExpertIndex expert) const {
    CHECK(expert.value < experts_.size());
    return experts_[expert.value];
  }
  [[nodiscard]] Slot& at(SlotIndex slot) {
    CHECK(slot.value < slots_.size());
    return slots_[slot.value];
  }
  [[nodiscard]] Command make_command(CommandKind kind, ExpertIndex expert, SlotIndex slot) const {
    Command command;
    command.kind = kind;
    command.model = place_.model;
    command.layer = place_.layer;
    command.expert = expert;
    command.slot = slot;
    return command;
  }
  [[nodiscard]] static bool is_in_ram(const Expert& expert) {
    return expert.state == ExpertState::kResident && expert.slot.value < kDeviceSlot;
  }
  [[nodiscard]] static bool is_on_device(const Expert& expert) {
    return expert.state == ExpertState::kResident && expert.slot.value >= kDeviceSlot;
  }
  // Open slots that are neither free nor anybody's.
  [[nodiscard]] std::uint32_t n_vacant() const {
    const DeviceSlots::Move& move = device_.move();
    return n_stalled_ + (move.stage == DeviceSlots::Stage::kLeaving && !move.falling ? 1 : 0);
  }
  [[nodiscard]] bool is_decodes(const Expert& expert) const {
    return !expert.is_prompts && step_ - expert.last_step <= kDecodeMemory;
  }
  // Into victims_: those of prompts first. REQUIRES: there are as many.
  void choose_victims(std::size_t n, ExpertIndex spared, Phase phase);
  // Into victims_: who goes for the newcomer of decode, where there are peers; returns what that gains.
  // REQUIRES: n_evictable_ > 0.
  double choose_beside_peers(ExpertIndex newcomer);
  // Uses per step that a slot with the expert saves. A second copy saves the way to the first, and that to
  // this model's lanes alone.
  [[nodiscard]] double value(ExpertIndex expert) const {
    return is_elsewhere(expert) ? peer_cost_ * own_history_.rate(expert) : history_.rate(expert);
  }
  Step use(std::span<const ExpertIndex> experts, bool is_own);  // by decode
  // Steps of all lanes that the policy hears of, for one of this model's own.
  [[nodiscard]] double steps_per_own() const {
    return 1 / std::max(own_share_, 1 / static_cast<double>(1 + peers_.size()));
  }
  void command_read(ExpertIndex expert, SlotIndex slot, std::vector<Command>& commands);
  void used_by_decode(Expert& expert, Step step);
  void lose_prefetch(Expert& expert);  // it is absent again
  // Into a free slot or the next victim's.
  void place(ExpertIndex expert, Step step, std::vector<Command>& commands);
  // The next of victims_ is resident no longer, for one that is coming or for nobody: its slot.
  SlotIndex evict(SlotState to, ExpertIndex coming, std::vector<Command>& commands);
  void add_open(std::int32_t n);  // and tells the policy
  enum class Tier : std::uint8_t { kRam, kDevice };
  // Seeds a new policy with the history, and with what one would know that had seen the last event of each
  // expert.
  void tell_past(EvictionPolicy& policy, Tier tier) const;

  // rises.cc
  void device_grace_done(SlotIndex slot, std::vector<Command>& commands);
  Grace vacated(SlotIndex slot, std::vector<Command>& commands);  // grace_done of kLeaving and kStalled
  void put_back(std::vector<Command>& commands);
  // Out of service. False: the falling expert that was to come there has been given up.
  bool keep_for_stalled(SlotIndex slot, std::vector<Command>& commands);
  void give_up_falling(std::vector<Command>& commands);  // it is on disk alone
  void end_move(std::vector<Command>& commands);
  void command_copy_up(std::vector<Command>& commands) const;
  void command_spare_freed(std::int32_t spare, std::vector<Command>& commands) const;

  // Steps of decode after which an expert that none of them used is not decode's any more.
  static constexpr Step kDecodeMemory = 1024;
  // Of the history that outlives policies, as the ewma policy's default.
  static constexpr double kHistoryDecay = 0.97;
  static constexpr double kShareDecay = 0.99;

  Place place_;
  std::unique_ptr<EvictionPolicy> policy_;
  LayerCounters& counters_;
  UseRates history_;      // of this model's lanes and of those that may read its slots
  UseRates own_history_;  // of this model's lanes, in the same steps
  PolicyCosts costs_;
  bool has_costs_ = false;
  DeviceSlots device_;
  std::vector<Slot> slots_;
  std::vector<Expert> experts_;
  std::vector<SlotIndex> free_, closed_;        // used from the back
  std::vector<ExpertIndex> candidates_;         // scratch
  std::vector<ExpertIndex> prompt_candidates_;  // scratch
  std::vector<ExpertIndex> copies_;             // scratch: candidates that are elsewhere as well
  std::vector<ExpertIndex> victims_;            // scratch
  std::vector<const LayerTable*> peers_;
  double peer_cost_ = 1;
  double own_share_ = 1;  // of recent steps
  std::size_t next_victim_ = 0;
  std::uint32_t n_resident_ = 0;
  std::uint32_t n_evictable_ = 0;  // resident and not pinned
  std::uint32_t n_held_ = 0;       // experts in RAM slots
  std::uint32_t n_stalled_ = 0;    // slots
  std::uint32_t n_open_ = 0, n_closing_ = 0, n_draining_ = 0;
  Step step_ = 0;
};

}  // namespace moecached
