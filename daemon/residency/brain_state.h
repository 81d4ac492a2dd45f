// What the brain remembers, shared by brain.cc (events), leases.cc (who waits for what), trades.cc (how many
// slots a layer has), rises.cc (device slots) and brain_check.cc.
// Private to this folder. Thread: core loop. Memory: owned by Brain.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/residency/brain.h"
#include "daemon/residency/lane_list.h"
#include "daemon/residency/layer_table.h"
#include "daemon/residency/prefetch.h"
#include "daemon/residency/slot_trader.h"

namespace moecached {

// A lease in the life of its lane:  none -> queued -> loading -> granted -> none  (any state -> none:
// dropped). Only loading and granted leases pin experts: a queued one holds nothing, which is why no cycle of
// waits can form.
enum class LeaseState : std::uint8_t { kNone, kQueued, kLoading, kGranted };

struct Lease {
  LeaseState state = LeaseState::kNone;
  LayerIndex layer;
  std::uint32_t seq = 0;
  std::uint32_t n_absent = 0;  // kLoading: of its experts, not resident yet
  std::uint64_t epoch = 0;
  Step step = 0;  // of the lease event
  Phase phase = Phase::kDecode;
  std::vector<ExpertIndex> experts;  // capacity: the largest n_slots of the model
};

// What a stalled lane keeps until `epoch` is completed, whatever becomes of its lease.
struct Hold {
  LayerIndex layer;
  std::uint64_t epoch = 0;
  std::vector<ExpertIndex> experts;  // distinct, resident
};

struct LayerState {
  LayerTable table;
  LaneList queue;                // lanes whose lease is kQueued, served in this order
  LaneList loading;              // lanes whose lease is kLoading
  LayerShape shape;              // as it began
  LayerIndex closing_for;        // whose the slot is going to be; meaningful while one is closing
  std::uint32_t n_promised = 0;  // slots that others are closing for this layer
};

struct ModelState {
  std::string policy, device_policy;
  std::uint32_t n_open_lanes = 0;
  std::uint32_t n_slots_max = 0;
  std::uint32_t n_expert_used = 0;
  std::unique_ptr<SlotTrader> trader;         // scope global
  std::vector<SlotTrader::Side> trade_sides;  // scratch
  std::vector<LayerCounters> counters;
  std::vector<LayerState> layers;
  std::vector<std::uint8_t> marks;     // scratch, one per expert of the widest layer
  std::unique_ptr<Prefetch> prefetch;  // nullptr: off
  std::vector<ModelState*> peers;      // whose slots its lanes can read
  double peer_cost = 1;
};

struct LaneState {
  bool is_open = false;
  ModelId model_id;
  ModelState* model = nullptr;
  std::uint64_t completed = 0;  // newest epoch reported
  Lease lease;
  std::vector<Hold> holds;  // empty but for a stalled lane; at most one per layer
  Prefetch::Latest latest;
};

struct Brain::State {
  const PolicyLibraries* libraries = nullptr;
  std::map<ModelId, std::unique_ptr<ModelState>> models;
  std::vector<LaneState> lanes;
  std::vector<LaneLink> links;  // one per lane, for the lists of the layers
  std::vector<Command> commands;
  std::vector<Command> taken;
  std::vector<LaneId> requeued;  // scratch

  // brain.cc
  [[nodiscard]] ModelState* find_model(ModelId id) const;
  [[nodiscard]] LaneState& open_lane(LaneId lane);
  [[nodiscard]] static LayerState& layer_of(ModelState& model, LayerIndex layer);
  static void tell_peers(ModelState& model);  // its layers of those of its peers
  // Of RAM or of device slots: in all models or in none.
  Status set_policies(std::span<const ModelId> ids, const std::string& spec, bool is_device);

  // leases.cc
  void ask(LaneId id,
           std::span<const ExpertIndex> experts);  // the lane's lease, filled in but for its experts
  void drop(LaneId id);                            // whatever state the lease is in; serves who waited
  void serve_queue(LayerState& layer);
  void load_ended(LayerState& layer, ExpertIndex expert, ReadOutcome outcome);
  void queue_again(LayerState& layer,
                   ExpertIndex expert);  // leases that wait for an expert without a slot; serves nobody

  // trades.cc
  [[nodiscard]] bool can_spare_slot(const ModelState& model, const LayerState& layer) const;
  // Of its addresses: those that are open, will be, or still hold memory.
  [[nodiscard]] static std::uint32_t n_taken(const LayerState& layer) {
    return layer.table.n_slots() + layer.table.n_closing() + layer.table.n_draining() + layer.n_promised;
  }
  void trade_undone(ModelState& model, LayerState& from);  // the slot that was closing stays open

  // holds.cc
  void add_hold(LaneId id, LayerIndex layer, std::span<const ExpertIndex> experts, std::uint64_t epoch);
  void drop_holds(LaneId id, std::uint64_t completed);    // those whose epoch is over; serves who waited
  void refuse_misfits(LayerState& layer);                 // queued leases that no release of a lease can help
  bool undo(const Eviction& eviction, bool move_coming);  // all of undo_eviction but the hold

  // prefetch.cc
  void look_ahead(LaneId id, LayerIndex layer, std::span<const ExpertIndex> experts);  // of a decode event

 private:
  void start(LaneId id, LayerState& layer);
  void grant(LaneId id);
  void fail(LaneId id, LayerState& layer, GrantStatus status);
  void send_grant(LaneId id, GrantStatus status);
};

}  // namespace moecached
