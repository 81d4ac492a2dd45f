// Puts the events of a recording together to the rows of a trace: one for each token of each lane, with what
// it routed to in every layer. A row ends when its lane goes back to a lower layer, or to another graph.
// Where the daemon knows only the union of several tokens, the row holds that union and stands for all of
// them: the next row's `tok` says how many there were.
//
// Lanes that compute at the same time interleave layer by layer, rows cannot. Still the events of one layer
// come in the order of the recording, which is what a replay depends on: rows are written in the order in
// which they were begun, and where one lane overtakes another within a row, that row is written in two parts
// of equal `tok`.
//
// Thread: one. Memory: the open rows of at most kLanesMax lanes; who was silent for longest is forgotten.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "proto/control/v1/control.pb.h"

namespace moecached::ctl {

struct TraceRow {
  std::uint64_t seq = 0;       // lanes in the order of their appearance
  std::uint64_t tok = 0;       // tokens of the lane before this row
  std::uint32_t n_tokens = 1;  // of this row
  bool prefill = false;
  std::vector<std::vector<std::uint16_t>> experts;  // by layer; empty: not recorded
};

class TraceRows {
 public:
  static constexpr std::size_t kLanesMax = 1024;
  using Sink = std::function<void(const TraceRow&)>;

  TraceRows(std::uint32_t n_layers, Sink sink);
  // False, and nothing else, for an event that names a layer that there is not.
  bool add(const control::v1::RoutingEvent& event);
  void finish();  // the open rows, as they are

  [[nodiscard]] std::uint64_t n_sequences() const { return n_sequences_; }

 private:
  struct Open {
    TraceRow row;
    std::int64_t last_layer = -1;
    bool is_written = false;  // all of it so far
  };
  struct Lane {
    std::uint64_t seq = 0;
    std::uint64_t tok = 0;
    std::uint64_t graph = 0;
    std::uint64_t used = 0;  // number of its latest event
    std::vector<Open> open;  // by token of the batch; those from n_open on are kept to be used again
    std::size_t n_open = 0;
    std::uint64_t since = 0;  // number of the first event that is not written yet; 0: all is
  };
  Lane& lane_of(std::uint64_t id);
  Open& open_row(Lane& lane, std::uint32_t token);
  void order_behind_others(Lane& lane, std::uint32_t layer);
  [[nodiscard]] static bool holds(const Lane& lane, std::uint32_t layer);
  void write(Lane& lane);  // what there is of its open rows, after those that were begun before
  void put(Lane& lane);
  void end(Lane& lane);

  const std::uint32_t n_layers_;
  const Sink sink_;
  std::map<std::uint64_t, Lane> lanes_;
  std::uint64_t n_events_ = 0, n_sequences_ = 0;
};

}  // namespace moecached::ctl
