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

bool TraceRows::add(const control::v1::RoutingEvent& event) {
  if (event.layer() >= n_layers_ || event.token() >= kTokensMax) return false;
  Lane& lane = lane_of(event.lane());
  lane.used = ++n_events_;
  const bool is_another_graph = event.graph() != lane.graph;
  const bool goes_back = event.token() < lane.n_open && event.layer() <= lane.open[event.token()].last_layer;
  if (is_another_graph || goes_back) end(lane);
  lane.graph = event.graph();
  while (lane.n_open <= event.token()) {
    if (lane.open.size() == lane.n_open) lane.open.emplace_back();
    Open& fresh = lane.open[lane.n_open++];
    fresh.last_layer = -1;
    fresh.row.n_tokens = 1;
    fresh.row.prefill = false;
    fresh.row.experts.resize(n_layers_);
    for (auto& experts : fresh.row.experts) experts.clear();
  }
  Open& open = lane.open[event.token()];
  open.last_layer = event.layer();
  open.row.prefill = open.row.prefill || event.prefill();
  // In the last layer of a prompt only the tokens that are put out are computed: the row has as many as its
  // widest layer.
  if (event.graph() == 0) open.row.n_tokens = std::max(open.row.n_tokens, event.n_tokens());
  auto& experts = open.row.experts[event.layer()];
  for (const std::uint32_t expert : event.experts()) experts.push_back(static_cast<std::uint16_t>(expert));
  return true;
}

void TraceRows::end(Lane& lane) {
  for (std::size_t i = 0; i < lane.n_open; ++i) {
    Open& open = lane.open[i];
    if (open.last_layer < 0) continue;  // a token of the batch of which nothing was told
    open.row.seq = lane.seq;
    open.row.tok = lane.tok;
    lane.tok += open.row.n_tokens;
    sink_(open.row);
  }
  lane.n_open = 0;
}

void TraceRows::finish() {
  for (auto& [id, lane] : lanes_) end(lane);
}

}  // namespace moecached::ctl
