// A client's lane, one atomic action at a time, after the protocol of proto/shm/layout.h. It checks what it
// sees: the bytes of every slot that it computes with, twice, and every answer to a lease.
//
//   idle -> begin -> load entry, load entry ... -> post ROUTE -> read slot ... (twice) -> complete -> idle
//                        | absent
//                        +-> complete, post LEASE -> wait -> begin
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "tests/sim/world.h"

namespace moecached::sim {

struct Record {
  bool is_lease = false;
  LayerIndex layer;
  std::vector<ExpertIndex> ids;
  std::uint32_t seq = 0;    // leases
  std::uint64_t epoch = 0;  // that uses the ids, or is going to
  // A prompt's. Decode takes four at most, see FakeLane::plan.
  [[nodiscard]] moecached::Phase phase() const {
    return ids.size() > 4 ? moecached::Phase::kPrompt : moecached::Phase::kDecode;
  }
};

// What both sides see.
struct LaneWords {
  std::uint64_t begun_epoch = 0;
  std::uint32_t begun_layer = kLayerAll;
  std::uint64_t completed = 0;
  std::uint32_t lease_done = 0;
  GrantStatus lease_status = GrantStatus::kOk;
  std::deque<Record> ring;
};

class FakeLane {
 public:
  enum class Kind : std::uint8_t { kOneLayer, kAllLayers, kLiar };
  enum class Phase : std::uint8_t { kIdle, kLoad, kPost, kRead, kComplete, kWait, kDead };

  FakeLane(World& world, ModelId model, Kind kind) : world_(world), model_(model), kind_(kind) {}

  void step();  // nothing while it is dead, stalled or without an answer
  void die();
  void stall_until(std::uint64_t tick) { stalled_until_ = tick; }

  [[nodiscard]] ModelId model() const { return model_; }
  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] Phase phase() const { return phase_; }
  [[nodiscard]] bool is_within_epoch() const { return phase_ >= Phase::kLoad && phase_ <= Phase::kComplete; }
  [[nodiscard]] bool is_idle() const { return phase_ == Phase::kIdle && waves_.empty(); }
  // Whether it was promised that this expert stays and has not finished with it.
  [[nodiscard]] bool relies_on(LayerIndex layer, ExpertIndex expert) const;

  LaneWords words;

 private:
  struct Use {
    LayerIndex layer;
    ExpertIndex expert;
    std::int32_t slot = kAbsent;
    std::uint64_t serial = 0;
  };

  void plan();
  void begin();
  void load_entry();
  void read_slot();
  void post_routes();
  void complete();
  void take_answer();
  void lie();
  [[nodiscard]] std::vector<ExpertIndex> draw_set(const FakeLayer& layer, std::uint32_t n);
  void split_into_waves(std::size_t n_slots);

  World& world_;
  ModelId model_;
  Kind kind_;
  Phase phase_ = Phase::kIdle;
  std::deque<std::vector<Use>> waves_;  // front: what the current epoch computes with
  std::size_t at_ = 0;                  // in the front wave
  bool is_second_pass_ = false;
  bool is_leased_ = false;
  std::uint64_t epoch_ = 0;  // last completed
  std::uint32_t seq_ = 0;
  std::uint64_t waiting_since_ = 0;
  std::uint32_t walked_ = 0;  // layers
  std::uint32_t token_ = 0;
  std::uint64_t stalled_until_ = 0;
};

}  // namespace moecached::sim
