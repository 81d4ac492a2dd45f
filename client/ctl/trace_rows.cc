#include "client/ctl/trace_rows.h"

#include <algorithm>
#include <utility>

namespace moecached::ctl {

namespace {
constexpr std::uint32_t kTokensMax = 4096;  // of a batch: more than a daemon logs
}

TraceRows::TraceRows(std::uint32_t n_layers, Sink sink) : n_layers_(n_layers), sink_(std::move(sink)) {}

TraceRows::Lane& TraceRows::lane_of(std::uint64_t id) {
  const auto found = lanes_.find(id);
  if (found != lanes_.end()) return found->second;
  if (lanes_.size() >= kLanesMax) {
    const auto oldest =
        std::ranges::min_element(lanes_, {}, [](const auto& entry) { return entry.second.used; });
    end(oldest->second);
    lanes_.erase(oldest);
  }
  Lane& lane = lanes_[id];
  lane.seq = n_sequences_++;
  return lane;
}

TraceRows::Open& TraceRows::open_row(Lane& lane, std::uint32_t token) {
  while (lane.n_open <= token) {
    if (lane.open.size() == lane.n_open) lane.open.emplace_back();
    Open& fresh = lane.open[lane.n_open++];
    fresh.last_layer = -1;
    fresh.is_written = true;
    fresh.row.n_tokens = 1;
    fresh.row.prefill = false;
    fresh.row.experts.resize(n_layers_);
    for (auto& experts : fresh.row.experts) experts.clear();
  }
  return lane.open[token];
}

bool TraceRows::add(const control::v1::RoutingEvent& event) {
  if (event.layer() >= n_layers_ || event.token() >= kTokensMax) return false;
  Lane& lane = lane_of(event.lane());
  lane.used = ++n_events_;
  const bool is_another_graph = event.graph() != lane.graph;
  const bool goes_back = event.token() < lane.n_open && event.layer() <= lane.open[event.token()].last_layer;
  if (is_another_graph || goes_back) end(lane);
  lane.graph = event.graph();
  order_behind_others(lane, event.layer());
  Open& open = open_row(lane, event.token());
  open.last_layer = event.layer();
  open.is_written = false;
  open.row.prefill = open.row.prefill || event.prefill();
  // In the last layer of a prompt only what is put out is computed: a row has the tokens of its widest layer.
  if (event.graph() == 0) open.row.n_tokens = std::max(open.row.n_tokens, event.n_tokens());
  auto& experts = open.row.experts[event.layer()];
  for (const std::uint32_t expert : event.experts()) experts.push_back(static_cast<std::uint16_t>(expert));
  return true;
}

bool TraceRows::holds(const Lane& lane, std::uint32_t layer) {
  for (std::size_t i = 0; i < lane.n_open; ++i) {
    if (!lane.open[i].row.experts[layer].empty()) return true;
  }
  return false;
}

// The lane's row is to hold an event of `layer`: those that hold one already must be written before it.
void TraceRows::order_behind_others(Lane& lane, std::uint32_t layer) {
  const bool was_overtaken = lane.since != 0 && std::ranges::any_of(lanes_, [&](const auto& entry) {
                               return entry.second.since > lane.since && holds(entry.second, layer);
                             });
  if (was_overtaken) write(lane);
  if (lane.since == 0) lane.since = n_events_;
}

void TraceRows::write(Lane& lane) {
  if (lane.since == 0) return;
  std::vector<Lane*> first;
  for (auto& [id, other] : lanes_) {
    if (other.since != 0 && other.since < lane.since) first.push_back(&other);
  }
  std::ranges::sort(first, {}, &Lane::since);
  for (Lane* other : first) put(*other);
  put(lane);
}

void TraceRows::put(Lane& lane) {
  std::uint64_t tok = lane.tok;
  for (std::size_t i = 0; i < lane.n_open; ++i) {
    Open& open = lane.open[i];
    open.row.seq = lane.seq;
    open.row.tok = std::exchange(tok, tok + open.row.n_tokens);
    if (open.is_written) continue;
    sink_(open.row);
    open.is_written = true;
    for (auto& experts : open.row.experts) experts.clear();
  }
  lane.since = 0;
}

void TraceRows::end(Lane& lane) {
  write(lane);
  for (std::size_t i = 0; i < lane.n_open; ++i) lane.tok += lane.open[i].row.n_tokens;
  lane.n_open = 0;
}

void TraceRows::finish() {
  for (auto& [id, lane] : lanes_) end(lane);  // each takes those with it that were begun before
}

}  // namespace moecached::ctl
