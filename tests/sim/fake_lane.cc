#include "tests/sim/fake_lane.h"

#include <algorithm>

namespace moecached::sim {

void FakeLane::step() {
  if (phase_ == Phase::kDead) return;
  if (world_.now < stalled_until_ && !world_.is_winding_down) return;
  if (kind_ == Kind::kLiar) return lie();
  switch (phase_) {
    case Phase::kIdle:
      if (waves_.empty()) plan();
      if (!waves_.empty()) begin();
      return;
    case Phase::kLoad:
      return load_entry();
    case Phase::kPost:
      return post_routes();
    case Phase::kRead:
      return read_slot();
    case Phase::kComplete:
      return complete();
    case Phase::kWait:
      return take_answer();
    case Phase::kDead:
      return;
  }
}

void FakeLane::die() {
  if (phase_ == Phase::kWait) {
    ++world_.stats.deaths_waiting;
  } else if (phase_ == Phase::kIdle) {
    ++world_.stats.deaths_idle;
  } else {
    ++world_.stats.deaths_mid_epoch;
  }
  phase_ = Phase::kDead;
}

bool FakeLane::relies_on(LayerIndex layer, ExpertIndex expert) const {
  if (phase_ == Phase::kDead || kind_ != Kind::kOneLayer || waves_.empty()) return false;
  const bool is_answered =
      phase_ == Phase::kWait && words.lease_done == seq_ && words.lease_status == GrantStatus::kOk;
  if (!is_answered && !is_leased_) return false;
  return std::any_of(waves_.front().begin(), waves_.front().end(),
                     [&](const Use& use) { return use.layer == layer && use.expert == expert; });
}

std::vector<ExpertIndex> FakeLane::draw_set(const FakeLayer& layer, std::uint32_t n) {
  std::vector<ExpertIndex> set;
  while (set.size() < n) {
    // The smaller of two draws: low experts are in demand, as real routing is skewed.
    const std::uint32_t a = world_.rng.below(layer.shape.n_experts);
    const std::uint32_t b = world_.rng.below(layer.shape.n_experts);
    const ExpertIndex expert(std::min(a, b));
    if (std::find(set.begin(), set.end(), expert) == set.end()) set.push_back(expert);
  }
  return set;
}

void FakeLane::plan() {
  if (world_.is_winding_down) return;
  FakeModel& model = world_.models.at(model_);
  std::vector<Use> uses;
  const auto add = [&](std::uint32_t index) {
    const FakeLayer& layer = model.layers[index];
    std::uint32_t n = world_.rng.between(1, std::min(layer.shape.n_experts, 4u));
    if (world_.rng.below(12) == 0) n = world_.rng.between(1, layer.shape.n_experts);  // a prompt batch
    for (ExpertIndex expert : draw_set(layer, n))
      uses.push_back({.layer = LayerIndex(index), .expert = expert});
  };
  if (world_.options.prefetch && kind_ == Kind::kOneLayer && world_.rng.below(20) != 0) {
    // Three kinds of tokens; what one uses in a layer says what it uses in the next.
    const auto n_layers = static_cast<std::uint32_t>(model.layers.size());
    const std::uint32_t index = ++walked_ % n_layers;
    if (index == 0) token_ = world_.rng.below(3);
    const std::uint32_t n_experts = model.layers[index].shape.n_experts;
    for (std::uint32_t k = 0; k < std::min(n_experts, 2u); ++k)
      uses.push_back(
          {.layer = LayerIndex(index), .expert = ExpertIndex((2 * token_ + index + k) % n_experts)});
  } else if (kind_ == Kind::kAllLayers) {
    for (std::uint32_t i = 0; i < model.layers.size(); ++i) add(i);
  } else {
    add(world_.rng.below(model.layers.size()));
  }
  waves_.push_back(std::move(uses));
}

void FakeLane::begin() {
  words.begun_epoch = epoch_ + 1;
  words.begun_layer = kind_ == Kind::kAllLayers ? kLayerAll : waves_.front().front().layer.value;
  phase_ = Phase::kLoad;
  at_ = 0;
}

void FakeLane::load_entry() {
  std::vector<Use>& wave = waves_.front();
  Use& use = wave[at_];
  use.slot = world_.layer(model_, use.layer).table[use.expert.value];
  if (use.slot == kAbsent) {
    expect(!is_leased_, ViolationKind::kUntruthfulGrant,
           "a lane with a granted lease found an expert absent");
    if (kind_ == Kind::kAllLayers) {  // it reads this one from the file itself
      wave.erase(wave.begin() + static_cast<std::ptrdiff_t>(at_));
    } else {
      words.completed = ++epoch_;  // it used nothing
      Record record{.is_lease = true, .layer = use.layer, .ids = {}, .seq = ++seq_, .epoch = epoch_ + 1};
      for (const Use& each : wave) record.ids.push_back(each.expert);
      words.ring.push_back(std::move(record));
      phase_ = Phase::kWait;
      waiting_since_ = world_.now;
      return;
    }
  } else {
    ++at_;
  }
  if (at_ < wave.size()) return;
  at_ = 0;
  is_second_pass_ = false;
  phase_ = wave.empty() ? Phase::kComplete : Phase::kPost;
}

void FakeLane::read_slot() {
  std::vector<Use>& wave = waves_.front();
  Use& use = wave[at_];
  const SlotBytes& bytes = world_.layer(model_, use.layer).bytes_at(static_cast<std::uint32_t>(use.slot));
  expect(!bytes.is_torn && bytes.expert == use.expert, ViolationKind::kWrongBytes,
         "a lane computed with a slot that does not hold its expert");
  if (!is_second_pass_) use.serial = bytes.serial;
  expect(bytes.serial == use.serial, ViolationKind::kWrongBytes,
         "a slot was written while a lane computed with it");
  if (++at_ < wave.size()) return;
  at_ = 0;
  if (!is_second_pass_) {
    is_second_pass_ = true;
  } else {
    phase_ = Phase::kComplete;
  }
}

void FakeLane::post_routes() {
  // Behind a lease a client may leave the record out, as the lease was counted already: both must do.
  if (!is_leased_ || world_.rng.below(2) == 0) {
    for (const Use& use : waves_.front()) {
      if (words.ring.empty() || words.ring.back().is_lease || words.ring.back().layer != use.layer ||
          &use == &waves_.front().front()) {
        words.ring.push_back(
            {.is_lease = false, .layer = use.layer, .ids = {}, .seq = 0, .epoch = epoch_ + 1});
      }
      words.ring.back().ids.push_back(use.expert);
    }
  }
  phase_ = Phase::kRead;
}

void FakeLane::complete() {
  words.completed = ++epoch_;
  is_leased_ = false;
  waves_.pop_front();
  phase_ = Phase::kIdle;
  ++world_.stats.epochs;
  if (kind_ == Kind::kAllLayers) ++world_.stats.all_layer_epochs;
}

void FakeLane::take_answer() {
  if (words.lease_done != seq_) return;
  world_.stats.wait_ticks_max = std::max(world_.stats.wait_ticks_max, world_.now - waiting_since_);
  // The epoch of a lease uses its experts or nothing: the daemon takes the record at its word.
  if (words.lease_status != GrantStatus::kOk) words.completed = ++epoch_;
  switch (words.lease_status) {
    case GrantStatus::kOk:
      ++world_.stats.grants;
      is_leased_ = true;
      return begin();
    case GrantStatus::kIoError:
    case GrantStatus::kModelChanged:
      ++world_.stats.failed_grants;
      waves_.pop_front();  // read from the file, or not computed at all
      break;
    case GrantStatus::kNoRoom:  // a stalled lane keeps the slots, or a prompt would take decode's: it streams
      ++(waves_.front().size() > 4 ? world_.stats.streamed_prompts : world_.stats.refused_by_stall);
      waves_.pop_front();
      break;
    case GrantStatus::kRefused:
      ++world_.stats.refusals;
      split_into_waves(world_.layer(model_, waves_.front().front().layer).n_open);
      break;
  }
  phase_ = Phase::kIdle;
}

void FakeLane::split_into_waves(std::size_t n_slots) {
  const std::vector<Use> whole = std::move(waves_.front());
  waves_.pop_front();
  for (std::size_t first = 0; first < whole.size(); first += n_slots) {
    const std::size_t last = std::min(first + n_slots, whole.size());
    waves_.emplace_back(whole.begin() + static_cast<std::ptrdiff_t>(first),
                        whole.begin() + static_cast<std::ptrdiff_t>(last));
    ++world_.stats.waves;
  }
}

// What a shell lets through after its checks: ids in range and distinct, any epoch, at any time.
void FakeLane::lie() {
  ++world_.stats.lies;
  Rng& rng = world_.rng;
  FakeModel& model = world_.models.at(model_);
  const LayerIndex layer(rng.below(model.layers.size()));
  switch (rng.below(4)) {
    case 0:
      words.completed = rng.below(3) == 0 ? UINT64_MAX : rng.below(40);
      break;
    case 1:
      words.begun_layer = layer.value;
      words.begun_epoch = rng.below(40);
      break;
    default: {
      if (words.ring.size() > 4) break;
      Record record{.is_lease = rng.below(2) == 0, .layer = layer, .ids = {}, .seq = 0, .epoch = 0};
      const FakeLayer& shape = model.layers[layer.value];
      record.ids = draw_set(shape, rng.between(0, shape.shape.n_experts));
      if (record.is_lease) {
        record.seq = ++seq_;
        record.epoch = rng.below(3) == 0 ? UINT64_MAX : rng.below(40);
      }
      words.ring.push_back(std::move(record));
    }
  }
}

}  // namespace moecached::sim
