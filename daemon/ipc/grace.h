// Grace periods: when may a slot whose table entry was set to absent be overwritten? When every lane that
// could have read the entry before has finished the epoch in which it did (quiescent-state reclamation; the
// protocol is in proto/shm/layout.h). Pure apart from loads of lane words. Thread: core loop.
// Memory: entries are recycled.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "proto/shm/layout.h"

namespace moecached {

// One open lane of the model, as far as grace periods care.
struct GraceLane {
  std::uint64_t key = 0;  // unique over time: a lane that is opened again has another key
  moecached_shm_lane* words = nullptr;
};

struct GraceTicket {
  ModelId model;
  LayerIndex layer;
  SlotIndex slot;
  ExpertIndex expert;  // that is leaving the slot
};

class GraceTracker {
 public:
  // What the lane is known to use in `epoch`, from its routing record: true if it certainly does not use the
  // expert. Lets a stalled lane block only the slots it really uses.
  using KnownUnused =
      std::function<bool(std::uint64_t lane_key, std::uint64_t epoch, LayerIndex layer, ExpertIndex expert)>;

  // Call after the table entries of `tickets` were set to absent (sequentially consistent stores). Looks at
  // the lanes, and appends to `done` the tickets that nobody can be using; the others wait.
  void begin(std::span<const GraceTicket> tickets, std::span<const GraceLane> lanes,
             std::vector<GraceTicket>* done);
  // Looks again; appends tickets whose last lane has moved on.
  void poll(const KnownUnused& known_unused, std::vector<GraceTicket>* done);
  void lane_gone(std::uint64_t lane_key);
  void model_gone(ModelId model);
  void forget(const GraceTicket& ticket);  // it is not waited for any more and will not be reported
  [[nodiscard]] bool empty() const { return waiting_.empty(); }
  // Calls back for each lane that a ticket waits for, with the ticket: for stall detection.
  void for_each_wait(const std::function<void(std::uint64_t lane_key, const GraceTicket&)>& visit) const;

 private:
  struct Wait {
    std::uint64_t lane_key;
    moecached_shm_lane* words;
    std::uint64_t epoch;
  };
  struct Entry {
    GraceTicket ticket;
    std::vector<Wait> waits;
  };
  std::vector<Entry> waiting_;
};

}  // namespace moecached
