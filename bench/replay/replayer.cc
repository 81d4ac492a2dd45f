#include "bench/replay/replayer.h"

#include <algorithm>
#include <ctime>

#include "daemon/base/check.h"
#include "daemon/residency/promotion.h"

namespace moecached::replay {
namespace {

class Replayer {
 public:
  Replayer(const Trace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        n_layers_(trace.header().n_layers),
        n_experts_(trace.header().n_experts),
        n_pools_(options.private_pools ? options.n_lanes : 1),
        resident_(std::size_t{n_pools_} * n_layers_ * n_experts_) {}

  Status begin() {
    ModelShape shape{.layers = {}, .policy = options_.policy};
    for (const std::uint32_t n : options_.n_slots) shape.layers.push_back({n_experts_, n});
    for (std::uint32_t pool = 0; pool < n_pools_; ++pool) {
      if (Status added = brain_.add_model(ModelId(pool), shape); !added) return added;
    }
    for (std::uint32_t lane = 0; lane < options_.n_lanes; ++lane)
      brain_.lane_opened(LaneId(lane), ModelId(pool_of(lane)));
    return ok();
  }

  void turn(const Turn& turn) {
    phase_ = trace_.row(turn.row).is_decode ? Phase::kDecode : Phase::kPrompt;
    tally_ = phase_ == Phase::kDecode ? &result_.decode : &result_.prefill;
    ++tally_->rows;
    for (std::uint32_t layer = 0; layer < n_layers_; ++layer) {
      const std::span<const std::uint16_t> event = trace_.event(turn.row, layer);
      if (event.empty()) continue;
      experts_.clear();
      std::uint64_t hits = 0;
      const std::uint8_t* resident = &resident_[table_at(pool_of(turn.lane), layer)];
      for (const std::uint16_t id : event) {
        experts_.emplace_back(id);
        hits += resident[id];
      }
      tally_->lookups += event.size();
      tally_->hits += hits;
      const bool missed = hits < event.size();
      if (options_.mode == Mode::kPool && missed) {
        load(LaneId(turn.lane), LayerIndex(layer));
      } else {
        brain_.routed(LaneId(turn.lane), LayerIndex(layer), experts_, phase_);
        if (missed) promote(pool_of(turn.lane), LayerIndex(layer));
      }
    }
  }

  ReplayResult finish() {
    result_.layers.resize(n_layers_);
    for (std::uint32_t pool = 0; pool < n_pools_; ++pool) {
      const std::span<const LayerCounters> counters = brain_.counters(ModelId(pool));
      for (std::uint32_t l = 0; l < n_layers_; ++l) {
        result_.layers[l].lookups += counters[l].lookups;
        result_.layers[l].hits += counters[l].hits;
        result_.layers[l].misses += counters[l].misses;
        result_.layers[l].insertions += counters[l].insertions;
        result_.layers[l].evictions += counters[l].evictions;
        result_.layers[l].leases += counters[l].leases;
      }
    }
    // Two books were kept, the table of this shell and the brain's.
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
  [[nodiscard]] std::uint32_t pool_of(std::uint32_t lane) const { return options_.private_pools ? lane : 0; }
  [[nodiscard]] std::size_t table_at(std::uint32_t pool, std::uint32_t layer) const {
    return (std::size_t{pool} * n_layers_ + layer) * n_experts_;
  }

  // As Core does: a lease, held for one epoch.
  void load(LaneId lane, LayerIndex layer) {
    if (experts_.size() > options_.n_slots[layer.value]) {
      // A client streams these, without slots; the hits among them are all that the brain learns to keep.
      ++result_.events_too_wide;
      brain_.routed(lane, layer, experts_, phase_);
      return;
    }
    brain_.lease(lane, layer, experts_, ++seq_, ++epoch_, phase_);
    carry_out_commands();
    CHECK(granted_ == seq_);
    brain_.epoch_completed(lane, epoch_);
  }

  // As GpuService::promote does, with room on the link for all of them.
  void promote(std::uint32_t pool, LayerIndex layer) {
    if (options_.mode != Mode::kCovered) return;
    const ModelId model(pool);
    candidates_.clear();
    const std::uint8_t* resident = &resident_[table_at(pool, layer.value)];
    for (const ExpertIndex expert : experts_) {
      if (resident[expert.value] != 0) continue;
      const double gain = brain_.promotion_gain(model, layer, expert, phase_);
      if (gain >= kPromotionGainMin) candidates_.push_back({gain, expert});
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.gain > b.gain; });
    for (const Candidate& candidate : candidates_) {
      // Asked again: the promotions of this round have changed what is worth it.
      if (&candidate != candidates_.data() &&
          brain_.promotion_gain(model, layer, candidate.expert, phase_) < kPromotionGainMin)
        continue;
      if (brain_.promote(model, layer, candidate.expert, phase_)) carry_out_commands();
    }
  }

  void carry_out_commands() {
    for (;;) {
      const std::span<const Command> taken = brain_.take_commands();
      if (taken.empty()) return;
      commands_.assign(taken.begin(), taken.end());  // the span ends with the next event
      for (const Command& command : commands_) {
        switch (command.kind) {
          case CommandKind::kUnpublish:
            entry(command) = 0;
            brain_.grace_done(command.model, command.layer, command.slot);
            break;
          case CommandKind::kRead:
            brain_.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
            break;
          case CommandKind::kPublish:
            entry(command) = 1;
            ++tally_->insertions;
            break;
          case CommandKind::kGrant:
            // A prompt that decode leaves no room streams, as those that are too wide do.
            CHECK(command.status == GrantStatus::kOk ||
                  (command.status == GrantStatus::kNoRoom && phase_ == Phase::kPrompt));
            granted_ = command.seq;
            break;
        }
      }
    }
  }
  std::uint8_t& entry(const Command& command) {
    return resident_[table_at(command.model.value, command.layer.value) + command.expert.value];
  }

  struct Candidate {
    double gain;
    ExpertIndex expert;
  };
  const Trace& trace_;
  const ReplayOptions& options_;
  const std::uint32_t n_layers_, n_experts_, n_pools_;
  Brain brain_;
  ReplayResult result_;
  Phase phase_ = Phase::kDecode;
  Tally* tally_ = nullptr;
  std::vector<std::uint8_t> resident_;  // the slot table: by pool, layer, expert
  std::uint32_t seq_ = 0, granted_ = 0;
  std::uint64_t epoch_ = 0;
  // Scratch.
  std::vector<ExpertIndex> experts_;
  std::vector<Command> commands_;
  std::vector<Candidate> candidates_;
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

}  // namespace moecached::replay
