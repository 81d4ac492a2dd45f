#include "tests/sim/simulation.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "tests/sim/fake_shell.h"

namespace moecached::sim {
namespace {

constexpr std::array<std::string_view, 8> kPolicies = {"ewma",
                                                       "ewma:decay=500",
                                                       "lru",
                                                       "slru",
                                                       "slru:probation=50",
                                                       "slru:probation=100",
                                                       "slru:admit=second-miss",
                                                       "slru:probation=35,admit=second-miss"};

class Simulation {
 public:
  explicit Simulation(const SimOptions& options)
      : world_(options), shell_(world_), reap_at_(options.n_lanes), model_ids_(options.n_models) {}

  SimReport run() {
    SimReport report;
    try {
      start();
      for (; world_.now < world_.options.ticks; ++world_.now) tick();
      wind_down();
      shell_.check_at_rest();
    } catch (const Violation& violation) {
      report.violation = violation.kind;
      report.text = violation.what();
    }
    report.trace_hash = world_.trace.hash();
    report.trace = world_.trace.text();
    report.stats = world_.stats;
    return report;
  }

 private:
  void start() {
    for (ModelId& id : model_ids_) id = add_model();
    for (std::uint32_t i = 0; i < shell_.n_lanes(); ++i) open_lane(i);
  }

  [[nodiscard]] std::string draw_policy() {
    return std::string(kPolicies[world_.rng.below(kPolicies.size())]);
  }

  ModelId add_model() {
    ModelShape shape;
    if (world_.options.peers_permille > 0 && !alike_.empty()) shape.layers = alike_;
    const std::uint32_t n_layers = world_.rng.between(1, world_.options.n_layers_max);
    for (std::uint32_t i = 0; i < n_layers && alike_.empty(); ++i) {
      const std::uint32_t n_experts =
          world_.rng.between(world_.options.n_experts_min, world_.options.n_experts_max);
      shape.layers.push_back(
          {.n_experts = n_experts,
           .n_slots = world_.rng.between(1, std::min(n_experts, world_.options.n_slots_max))});
      // Asked first: the runs of seeds without trades stay what they were.
      if (world_.options.trade_permille == 0) continue;
      LayerShape& layer = shape.layers.back();
      layer.n_slots_max = world_.rng.between(layer.n_slots, n_experts);
      layer.slot_class = world_.rng.below(4) == 0 ? 1 : 0;
    }
    if (world_.options.trade_permille > 0) {
      shape.scope = world_.rng.below(3) == 0 ? SlotScope::kLayer : SlotScope::kGlobal;
      shape.n_expert_used = world_.rng.below(3);
    }
    if (world_.options.peers_permille > 0) alike_ = shape.layers;
    shape.policy = draw_policy();
    shape.prefetch = world_.options.prefetch;
    shape.prefetch_pace = {.learn_tokens = 8, .window = 16, .pause_tokens_min = 8, .pause_tokens_max = 64};
    const ModelId id(next_model_++);
    if (world_.options.rise_permille > 0) shape.device_policy = draw_policy();
    shell_.add_model(id, shape);
    if (world_.options.rise_permille > 0) {
      for (std::uint32_t i = 0; i < shape.layers.size(); ++i) {
        FakeLayer& layer = world_.layer(id, LayerIndex(i));
        // Often few: experts come down only where others want their slots.
        const std::uint32_t n_experts = layer.shape.n_experts;
        layer.n_device_max =
            world_.rng.between(0, world_.rng.below(3) == 0 ? n_experts : (n_experts + 2) / 3);
        shell_.open_device_slots(id, LayerIndex(i), world_.rng.between(0, layer.n_device_max));
      }
    }
    return id;
  }

  void open_lane(std::uint32_t lane) {
    FakeLane::Kind kind = FakeLane::Kind::kOneLayer;
    if (world_.rng.permille(world_.options.all_layers_permille)) kind = FakeLane::Kind::kAllLayers;
    if (world_.rng.permille(world_.options.liar_permille)) kind = FakeLane::Kind::kLiar;
    shell_.open_lane(lane, model_ids_[world_.rng.below(model_ids_.size())], kind);
  }

  void tick() {
    Rng& rng = world_.rng;
    const std::uint32_t lane = rng.below(shell_.n_lanes());
    const std::uint32_t action = rng.below(100);
    if (action < 50) {
      if (FakeLane* client = shell_.lane(lane)) client->step();
    } else if (action < 64) {
      shell_.drain_record(lane);
    } else if (action < 75) {
      shell_.poll_epoch(lane);
    } else if (action < 87) {
      if (shell_.n_graces() > 0) shell_.advance_grace(rng.below(shell_.n_graces()));
    } else {
      if (const std::size_t n = shell_.n_reads() + shell_.n_copies(); n > 0) {
        const std::size_t i = rng.below(n);
        const std::size_t n_reads = shell_.n_reads();
        if (i < n_reads && shell_.is_due(i)) shell_.finish_read(i);
        if (i >= n_reads && shell_.is_copy_due(i - n_reads)) shell_.finish_copy(i - n_reads);
      }
    }
    if (world_.options.long_stall_permille > 0) shell_.watch_stalls();
    attend_to_lane(lane);
    inject_faults();
  }

  // What becomes of a lane that is not there or not well.
  void attend_to_lane(std::uint32_t lane) {
    FakeLane* client = shell_.lane(lane);
    if (client == nullptr) {
      if (world_.rng.below(20) == 0) open_lane(lane);
    } else if (client->phase() == FakeLane::Phase::kDead) {
      if (reap_at_[lane] <= world_.now) shell_.close_lane(lane);
    }
  }

  void inject_faults() {
    Rng& rng = world_.rng;
    const SimOptions& options = world_.options;
    const std::uint32_t lane = rng.below(shell_.n_lanes());
    FakeLane* client = shell_.lane(lane);
    const bool is_alive = client != nullptr && client->phase() != FakeLane::Phase::kDead;
    if (is_alive && rng.permille(options.death_permille)) {
      client->die();
      reap_at_[lane] = world_.now + rng.below(60);  // the kernel and the daemon take their time to notice
    } else if (is_alive && rng.permille(options.stall_permille)) {
      client->stall_until(world_.now + rng.between(20, 500));
      ++world_.stats.stalls;
    } else if (is_alive && client->is_within_epoch() && rng.permille(options.long_stall_permille)) {
      client->stall_until(world_.now + rng.between(500, options.long_stall_ticks_max));
      ++world_.stats.long_stalls;
    } else if (is_alive && client->is_idle() && client->words.ring.empty() &&
               rng.permille(options.close_permille)) {
      shell_.close_lane(lane);
      ++world_.stats.closes;
    }
    if (rng.permille(options.policy_swap_permille)) {
      const ModelId model = model_ids_[rng.below(model_ids_.size())];
      if (rng.below(5) == 0) {
        shell_.set_policy(model, "slru:probation=101", false);
      } else {
        shell_.set_policy(model, draw_policy(), true);
      }
    }
    if (options.rise_permille > 0) inject_device_faults();
    // Asked first: the runs of seeds without promotions stay what they were.
    if (options.promote_permille > 0 && rng.permille(options.promote_permille)) promote_any();
    if (options.trade_permille > 0 && rng.permille(options.trade_permille)) trade_any();
    if (options.corrupt_permille > 0 && rng.permille(options.corrupt_permille)) corrupt_any();
    if (options.peers_permille > 0 && rng.permille(options.peers_permille)) change_peers();
    if (rng.permille(options.model_removal_permille)) {
      ModelId& model = model_ids_[rng.below(model_ids_.size())];
      shell_.remove_model(model);
      model = add_model();
    }
  }

  void inject_device_faults() {
    Rng& rng = world_.rng;
    const ModelId model = model_ids_[rng.below(model_ids_.size())];
    if (rng.permille(world_.options.policy_swap_permille)) {
      const bool is_valid = rng.below(5) != 0;
      shell_.set_device_policy(model, is_valid ? draw_policy() : "slru:probation=101", is_valid);
    }
    const LayerIndex index(rng.below(world_.models.at(model).layers.size()));
    const FakeLayer& layer = world_.layer(model, index);
    if (layer.device_slots.size() < layer.n_device_max && rng.permille(20))
      shell_.open_device_slots(model, index, 1);
  }

  void promote_any() {
    Rng& rng = world_.rng;
    const ModelId model = model_ids_[rng.below(model_ids_.size())];
    const LayerIndex layer(rng.below(world_.models.at(model).layers.size()));
    shell_.promote(model, layer, ExpertIndex(rng.below(world_.layer(model, layer).shape.n_experts)));
  }

  void corrupt_any() {
    Rng& rng = world_.rng;
    const ModelId model = model_ids_[rng.below(model_ids_.size())];
    const LayerIndex layer(rng.below(world_.models.at(model).layers.size()));
    shell_.corrupt(model, layer, SlotIndex(rng.below(world_.layer(model, layer).shape.room())));
  }

  void change_peers() {
    Rng& rng = world_.rng;
    std::vector<ModelId> peers;
    for (const ModelId model : model_ids_) {
      if (rng.below(3) != 0) peers.push_back(model);
    }
    shell_.set_peers(model_ids_[rng.below(model_ids_.size())], peers, rng.between(1, 1000) / 1000.0);
  }

  void trade_any() {
    Rng& rng = world_.rng;
    const ModelId model = model_ids_[rng.below(model_ids_.size())];
    const auto draw = [&] { return LayerIndex(rng.below(world_.models.at(model).layers.size())); };
    const LayerIndex from = draw();
    shell_.move_slot(model, from, draw());
  }

  // No more faults and no new work: in a bounded number of rounds everything must be at rest.
  void wind_down() {
    constexpr int kRoundsMax = 3000;
    world_.is_winding_down = true;
    for (std::uint32_t i = 0; i < shell_.n_lanes(); ++i) {
      const FakeLane* client = shell_.lane(i);
      if (client == nullptr) continue;
      if (client->kind() == FakeLane::Kind::kLiar || client->phase() == FakeLane::Phase::kDead)
        shell_.close_lane(i);
    }
    for (int round = 0; round < kRoundsMax; ++round, ++world_.now) {
      for (std::uint32_t i = 0; i < shell_.n_lanes(); ++i) {
        if (FakeLane* client = shell_.lane(i)) client->step();
        shell_.drain_record(i);
        shell_.poll_epoch(i);
      }
      for (std::size_t i = shell_.n_graces(); i > 0; --i) shell_.advance_grace(i - 1);
      for (std::size_t i = shell_.n_reads(); i > 0; --i) shell_.finish_read(i - 1);
      for (std::size_t i = shell_.n_copies(); i > 0; --i) shell_.finish_copy(i - 1);
      shell_.carry_out_commands();
      if (is_at_rest()) return;
    }
    throw Violation(ViolationKind::kStuck, "not at rest although no fault is pending");
  }

  [[nodiscard]] bool is_at_rest() {
    if (shell_.n_graces() > 0 || shell_.n_reads() > 0 || shell_.n_copies() > 0) return false;
    for (std::uint32_t i = 0; i < shell_.n_lanes(); ++i) {
      const FakeLane* client = shell_.lane(i);
      if (client != nullptr && (!client->is_idle() || !client->words.ring.empty())) return false;
    }
    return true;
  }

  World world_;
  FakeShell shell_;
  std::vector<std::uint64_t> reap_at_;
  std::vector<ModelId> model_ids_;
  std::vector<LayerShape> alike_;  // of all models, where they are peers
  std::uint32_t next_model_ = 0;
};

}  // namespace

SimReport simulate(const SimOptions& options) { return Simulation(options).run(); }

}  // namespace moecached::sim
