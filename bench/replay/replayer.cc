#include "bench/replay/replayer.h"

#include <ctime>
#include <memory>

#include "bench/replay/peer_pools.h"
#include "daemon/base/check.h"

namespace moecached::replay {
namespace {

class Replayer {
 public:
  Replayer(const Trace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        n_layers_(trace.header().n_layers),
        n_pools_(options.private_pools ? options.n_lanes : 1) {}

  Status begin() {
    ModelShape shape{.layers = {},
                     .policy = options_.policy,
                     .scope = options_.scope,
                     .n_expert_used = trace_.header().n_used,
                     .prefetch = options_.prefetch};
    const std::uint32_t n_experts = trace_.header().n_experts;
    // A trace names no slot classes: all its layers are of one.
    for (const std::uint32_t n : options_.n_slots)
      shape.layers.push_back(
          {.n_experts = n_experts, .n_slots = n, .n_slots_max = slot_room(options_.scope, n, n_experts)});
    for (std::uint32_t i = 0; i < n_pools_; ++i) {
      auto pool = InstantPool::create(shape, options_.mode, options_.private_pools ? 1 : options_.n_lanes);
      if (!pool) return std::move(pool).error();
      pools_.push_back(*std::move(pool));
    }
    return ok();
  }

  void turn(const Turn& turn) {
    const Phase phase = trace_.row(turn.row).is_decode ? Phase::kDecode : Phase::kPrompt;
    Tally& tally = phase == Phase::kDecode ? result_.decode : result_.prefill;
    ++tally.rows;
    InstantPool& pool = *pools_[options_.private_pools ? turn.lane : 0];
    const LaneId lane(options_.private_pools ? 0 : turn.lane);
    for (std::uint32_t layer = 0; layer < n_layers_; ++layer) {
      const std::span<const std::uint16_t> event = trace_.event(turn.row, layer);
      if (event.empty()) continue;
      experts_.clear();
      for (const std::uint16_t id : event) experts_.emplace_back(id);
      const InstantPool::Outcome outcome = pool.event(lane, LayerIndex(layer), experts_, phase);
      tally.lookups += event.size();
      tally.hits += outcome.hits;
      tally.insertions += outcome.insertions;
      result_.events_too_wide += outcome.too_wide ? 1 : 0;
    }
  }

  ReplayResult finish() {
    result_.layers.resize(n_layers_);
    result_.n_slots.resize(n_layers_);
    for (const auto& pool : pools_) {
      const std::span<const LayerCounters> counters = pool->counters();
      for (std::uint32_t l = 0; l < n_layers_; ++l) {
        result_.layers[l].lookups += counters[l].lookups;
        result_.layers[l].hits += counters[l].hits;
        result_.layers[l].misses += counters[l].misses;
        result_.layers[l].insertions += counters[l].insertions;
        result_.layers[l].evictions += counters[l].evictions;
        result_.layers[l].leases += counters[l].leases;
        result_.n_slots[l] += pool->slots(LayerIndex(l));
        result_.layers[l].prefetched += counters[l].prefetched;
        result_.layers[l].prefetch_used += counters[l].prefetch_used;
        result_.layers[l].prefetch_wasted += counters[l].prefetch_wasted;
        result_.layers[l].prefetch_regretted += counters[l].prefetch_regretted;
      }
    }
    result_.prefetch = pools_.front()->prefetch();
    // Two books were kept, the table of the shell and the brain's.
    const Tally total = result_.total();
    std::uint64_t hits = 0, insertions = 0;
    for (const LayerCounters& layer : result_.layers) {
      hits += layer.hits;
      insertions += layer.insertions;
    }
    CHECK(hits == total.hits && insertions == total.insertions);
    return std::move(result_);
  }

 private:
  const Trace& trace_;
  const ReplayOptions& options_;
  const std::uint32_t n_layers_, n_pools_;
  std::vector<std::unique_ptr<InstantPool>> pools_;
  ReplayResult result_;
  std::vector<ExpertIndex> experts_;  // scratch
};

}  // namespace

void Tally::add(const Tally& other) {
  rows += other.rows;
  lookups += other.lookups;
  hits += other.hits;
  insertions += other.insertions;
}

std::uint64_t link_experts(const Tally& tally, Mode mode) {
  return tally.insertions + (mode == Mode::kCovered ? tally.misses() : 0);
}

Tally ReplayResult::total() const {
  Tally sum = prefill;
  sum.add(decode);
  return sum;
}

Result<ReplayResult> replay(const Trace& trace, std::span<const Turn> order, const ReplayOptions& options) {
  CHECK(options.n_slots.size() == trace.header().n_layers && options.n_lanes >= 1);
  Replayer replayer(trace, options);
  if (Status begun = replayer.begin(); !begun) return std::move(begun).error();
  // Processor time, not wall time: the figure should not depend on who else uses the machine.
  const std::clock_t started = std::clock();
  for (const Turn& turn : order) replayer.turn(turn);
  ReplayResult result = replayer.finish();
  result.seconds = static_cast<double>(std::clock() - started) / CLOCKS_PER_SEC;
  return result;
}

Result<PeerResult> replay_peers(const Trace& trace, std::span<const Turn> order, const ReplayOptions& options,
                                double cost) {
  ModelShape shape;
  shape.policy = options.policy;
  shape.n_expert_used = trace.header().n_used;
  for (const std::uint32_t n : options.n_slots)
    shape.layers.push_back({.n_experts = trace.header().n_experts, .n_slots = n});
  auto pools = PeerPools::create(shape, options.n_lanes, cost);
  if (!pools) return std::move(pools).error();
  PeerResult result;
  std::vector<ExpertIndex> experts;
  for (const Turn& turn : order) {
    const Phase phase = trace.row(turn.row).is_decode ? Phase::kDecode : Phase::kPrompt;
    ++result.total.rows;
    for (std::uint32_t layer = 0; layer < trace.header().n_layers; ++layer) {
      const std::span<const std::uint16_t> event = trace.event(turn.row, layer);
      if (event.empty()) continue;
      experts.clear();
      for (const std::uint16_t id : event) experts.emplace_back(id);
      const PeerPools::Outcome outcome = (*pools)->event(turn.lane, LayerIndex(layer), experts, phase);
      result.total.lookups += event.size();
      result.total.hits += outcome.own_hits + outcome.peer_hits;
      result.total.insertions += outcome.insertions;
      result.peer_hits += outcome.peer_hits;
    }
  }
  result.copies = (*pools)->copies();
  for (const std::uint32_t n : options.n_slots) result.n_slots += std::uint64_t{n} * options.n_lanes;
  return result;
}

}  // namespace moecached::replay
