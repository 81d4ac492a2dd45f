// The daemon around the real Brain, without a kernel: drains rings, watches epochs, keeps the slot table,
// waits for grace periods, reads from a fake disk. It carries out what the Brain commands and checks each
// command against the state of the slot, the table and the lanes. Every public member is one atomic action.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/sim/fake_lane.h"
#include "tests/sim/world.h"

namespace moecached::sim {

class FakeShell {
 public:
  explicit FakeShell(World& world)
      : world_(world), lanes_(world.options.n_lanes), spares_(world.options.n_spares) {}

  // Configuration.
  void add_model(ModelId id, const ModelShape& shape);
  void remove_model(ModelId id);  // its processes die first; completions that are under way come late
  void set_policy(ModelId id, const std::string& spec, bool is_valid);
  void set_device_policy(ModelId id, const std::string& spec, bool is_valid);
  void open_device_slots(ModelId id, LayerIndex layer, std::uint32_t n);
  void open_lane(std::uint32_t lane, ModelId model, FakeLane::Kind kind);
  void close_lane(std::uint32_t lane);  // noticed dead, or closed in good order

  // Work; each does nothing when there is nothing to do.
  void poll_epoch(std::uint32_t lane);
  void drain_record(std::uint32_t lane);
  void advance_grace(std::size_t i);
  void finish_read(std::size_t i);  // REQUIRES: is_due(i) or winding down
  void finish_copy(std::size_t i);  // REQUIRES: is_copy_due(i) or winding down
  void watch_stalls();
  void set_peers(ModelId model, std::span<const ModelId> peers, double cost) {
    world_.trace.note("set peers", {model.value, static_cast<std::uint32_t>(peers.size())});
    brain_.set_peers(model, peers, cost);
    ++world_.stats.peer_changes;
  }
  void promote(ModelId model, LayerIndex layer, ExpertIndex expert);  // whatever state it is in
  void corrupt(ModelId model, LayerIndex layer, SlotIndex slot);      // whatever is in it
  void move_slot(ModelId model, LayerIndex from, LayerIndex to);
  void carry_out_commands();

  [[nodiscard]] FakeLane* lane(std::uint32_t id) { return lanes_[id].client.get(); }
  [[nodiscard]] std::uint32_t n_lanes() const { return static_cast<std::uint32_t>(lanes_.size()); }
  [[nodiscard]] std::size_t n_graces() const { return graces_.size(); }
  [[nodiscard]] std::size_t n_reads() const { return reads_.size(); }
  [[nodiscard]] bool is_due(std::size_t i) const { return reads_[i].due <= world_.now; }
  [[nodiscard]] std::size_t n_copies() const { return copies_.size(); }
  [[nodiscard]] bool is_copy_due(std::size_t i) const { return copies_[i].due <= world_.now; }
  // At rest: no lease is left, and the counters say what happened.
  void check_at_rest();

 private:
  struct Lane {
    std::unique_ptr<FakeLane> client;  // null: the id is free
    std::uint64_t opening = 0;         // tells two owners of one id apart
    // The lease that the Brain has and has not answered.
    std::uint32_t pending_seq = 0;
    std::vector<ExpertIndex> pending_ids;
    LayerIndex pending_layer, leased_layer;
    Phase pending_phase = moecached::Phase::kDecode;
    bool has_seen_io_error = false, has_seen_change = false;  // in reads of its experts
    bool is_pending = false;
    // Its last record, and since when a grace period has waited for the epoch that it is in.
    std::uint64_t use_epoch = 0;
    LayerIndex use_layer;
    std::vector<ExpertIndex> use_ids;
    std::uint64_t stalled_epoch = 0, stalled_since = 0;
  };
  struct Place {
    ModelId model;
    LayerIndex layer;
    SlotIndex slot;
  };
  struct Grace {
    struct Wait {
      std::uint32_t lane;
      std::uint64_t opening;
      std::uint64_t epoch;
    };
    Place place;
    ExpertIndex leaving;
    bool has_risen = false;    // leaving is in a device slot now
    bool is_given_up = false;  // the slot is out of service
    bool has_looked = false;
    std::vector<Wait> waits;
  };
  struct Read {
    Place place;
    ExpertIndex expert;
    std::uint64_t due = 0;
    ReadOutcome outcome = ReadOutcome::kOk;
    bool is_ahead = false;
    std::int32_t spare = -1;
  };
  // Between a RAM slot, a device slot and a spare slot.
  struct Copy {
    Place place;  // device slot
    ExpertIndex expert;
    std::int32_t from = -1;    // RAM slot: up
    std::int32_t spare = -1;   // aside
    std::uint64_t serial = 0;  // of the source's bytes as it began
    std::uint64_t due = 0;
  };
  static constexpr std::int32_t kNobody = -1;
  struct Spare {
    bool is_lent = false;
    ModelId model;
    LayerIndex layer;
    std::int32_t falling = kNobody;  // expert
    SlotIndex rising_from;           // once the other one has risen
    SlotBytes bytes;
  };

  void after_event();
  void unpublish(const Command& command);
  void start_read(const Command& command);
  void hasten(const Command& command);
  void publish(const Command& command);
  void release(const Command& command);
  void copy_up(const Command& command);
  void copy_aside(const Command& command);
  void move(const Command& command);
  void free_spare(const Command& command);
  void rise(ModelId model, LayerIndex layer, std::span<const ExpertIndex> used);
  // The one that is lent for this falling expert. With batches the Brain may have begun the next move of a
  // layer before the shell hears of the end of the last.
  [[nodiscard]] Spare* find_spare(ModelId model, LayerIndex layer, std::int32_t falling);
  void reclaim_spares();                           // of models that are gone, once nothing writes there
  void expect_idle(const Command& command) const;  // nothing goes on in its slot
  void tell_open();
  void grant(const Command& command);
  void look_at_lanes(Grace& grace) const;
  [[nodiscard]] bool is_over(const Grace& grace) const;
  void give_up_on(std::uint32_t lane, const Place& place, ExpertIndex leaving);
  [[nodiscard]] bool has_stalled(Lane& lane) const;
  void note_hold(std::uint32_t lane, LayerIndex layer) {
    world_.layer(lanes_[lane].client->model(), layer).has_been_held = true;
  }
  void note_lookups(FakeLayer& layer, const Record& record) const;

  World& world_;
  Brain brain_;
  std::vector<Lane> lanes_;
  std::vector<Grace> graces_;
  std::vector<Read> reads_;
  std::vector<Copy> copies_;
  std::vector<Spare> spares_;
  std::uint64_t n_openings_ = 0;
  std::uint64_t read_serial_ = 0;
  std::uint32_t n_events_untaken_ = 0;
};

}  // namespace moecached::sim
