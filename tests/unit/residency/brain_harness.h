// A Brain with one-word events and commands as text, whose books are checked after every event.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "daemon/residency/brain.h"

namespace moecached {

inline std::string to_text(const Command& command) {
  const auto number = [](std::uint32_t value) { return std::to_string(value); };
  const std::string slot = command.slot.value < kDeviceSlot
                               ? " slot " + number(command.slot.value)
                               : " device " + number(command.slot.value - kDeviceSlot);
  const std::string place = number(command.model.value) + "/" + number(command.layer.value) + " expert " +
                            number(command.expert.value) + slot;
  switch (command.kind) {
    case CommandKind::kUnpublish:
      return "unpublish " + place;
    case CommandKind::kRead:
      return (command.is_ahead ? "read ahead " : "read ") + place +
             (command.spare >= 0 ? " spare " + std::to_string(command.spare) : "");
    case CommandKind::kHasten:
      return "hasten " + place;
    case CommandKind::kPublish:
      return "publish " + place;
    case CommandKind::kRelease:
      return "release " + number(command.model.value) + "/" + number(command.layer.value) + " slot " +
             number(command.slot.value);
    case CommandKind::kCopyUp:
      return "copy up " + place + " from " + number(command.from.value);
    case CommandKind::kCopyAside:
      return "copy aside " + place + " spare " + std::to_string(command.spare);
    case CommandKind::kMove:
      return "move " + place + " from " + number(command.from.value);
    case CommandKind::kSpareFreed:
      return "spare freed " + std::to_string(command.spare);
    case CommandKind::kGrant:
      break;
  }
  static constexpr const char* kStatus[] = {"ok", "io error", "model changed", "refused", "no room"};
  std::string text = "grant lane " + number(command.lane.value) + " seq " + number(command.seq) + " ";
  return text.append(kStatus[static_cast<std::size_t>(command.status)]);
}

class BrainHarness {
 public:
  using Texts = std::vector<std::string>;
  using Experts = std::initializer_list<std::uint32_t>;
  static constexpr std::uint64_t kFar = 1000;  // an epoch that no test completes by accident

  // Model 0, one layer, lanes 0..n_lanes-1.
  explicit BrainHarness(LayerShape layer, std::uint32_t n_lanes = 2, const std::string& policy = "lru") {
    start({.layers = {layer}, .policy = policy}, n_lanes);
  }
  // Model 0 of several layers.
  explicit BrainHarness(const ModelShape& shape, std::uint32_t n_lanes = 2,
                        const PolicyLibraries* libraries = nullptr)
      : brain(libraries) {
    start(shape, n_lanes);
  }

  void start(const ModelShape& shape, std::uint32_t n_lanes) {
    const Status added = brain.add_model(ModelId(0), shape);
    EXPECT_TRUE(added);
    for (std::uint32_t lane = 0; lane < n_lanes; ++lane) brain.lane_opened(LaneId(lane), ModelId(0));
    checked();
  }

  [[nodiscard]] Texts routed(std::uint32_t lane, Experts experts, std::uint32_t layer = 0) {
    brain.routed(LaneId(lane), LayerIndex(layer), ids(experts));
    return checked();
  }
  [[nodiscard]] Texts lease(std::uint32_t lane, Experts experts, std::uint64_t epoch = kFar,
                            std::uint32_t layer = 0) {
    brain.lease(LaneId(lane), LayerIndex(layer), ids(experts), ++seq, epoch);
    return checked();
  }
  [[nodiscard]] Texts prompt_routed(std::uint32_t lane, Experts experts) {
    brain.routed(LaneId(lane), LayerIndex(0), ids(experts), Phase::kPrompt);
    return checked();
  }
  [[nodiscard]] Texts prompt_lease(std::uint32_t lane, Experts experts, std::uint64_t epoch = kFar) {
    brain.lease(LaneId(lane), LayerIndex(0), ids(experts), ++seq, epoch, Phase::kPrompt);
    return checked();
  }
  [[nodiscard]] Texts completed(std::uint32_t lane, std::uint64_t epoch = kFar) {
    brain.epoch_completed(LaneId(lane), epoch);
    return checked();
  }
  [[nodiscard]] Texts closed(std::uint32_t lane) {
    brain.lane_closed(LaneId(lane));
    return checked();
  }
  [[nodiscard]] Texts graced(std::uint32_t slot, std::uint32_t layer = 0) {
    brain.grace_done(ModelId(0), LayerIndex(layer), SlotIndex(slot));
    return checked();
  }
  [[nodiscard]] Texts read(std::uint32_t slot, ReadOutcome outcome = ReadOutcome::kOk,
                           std::uint32_t layer = 0) {
    brain.read_done(ModelId(0), LayerIndex(layer), SlotIndex(slot), outcome);
    return checked();
  }
  [[nodiscard]] Texts held(std::uint32_t lane, Experts experts, std::uint64_t epoch = kFar) {
    brain.hold(LaneId(lane), LayerIndex(0), ids(experts), epoch);
    return checked();
  }
  // The eviction of the expert from the slot, which the stalled lane may be using; "ignored" when it was.
  [[nodiscard]] Texts undone(std::uint32_t slot, std::uint32_t expert, std::uint32_t lane,
                             std::uint64_t epoch = kFar) {
    const bool is_undone = brain.undo_eviction(
        {ModelId(0), LayerIndex(0), SlotIndex(slot), ExpertIndex(expert)}, LaneId(lane), epoch);
    Texts texts = checked();
    if (!is_undone) texts.emplace_back("ignored");
    return texts;
  }
  [[nodiscard]] Texts cancelled(std::uint32_t slot, std::uint32_t expert, std::uint32_t layer = 0) {
    const bool is_undone =
        brain.cancel_eviction({ModelId(0), LayerIndex(layer), SlotIndex(slot), ExpertIndex(expert)});
    Texts texts = checked();
    if (!is_undone) texts.emplace_back("ignored");
    return texts;
  }
  // "refused" when nothing moves.
  [[nodiscard]] Texts moved(std::uint32_t from, std::uint32_t to) {
    const bool is_moving = brain.move_slot(ModelId(0), LayerIndex(from), LayerIndex(to));
    Texts texts = checked();
    if (!is_moving) texts.emplace_back("refused");
    return texts;
  }
  [[nodiscard]] std::uint32_t slots(std::uint32_t layer) const {
    return brain.slots(ModelId(0), LayerIndex(layer));
  }
  [[nodiscard]] double gain(std::uint32_t expert, std::uint32_t layer = 0) {
    return brain.promotion_gain(ModelId(0), LayerIndex(layer), ExpertIndex(expert));
  }
  // What it commands; "no room" when it was refused.
  [[nodiscard]] Texts promoted(std::uint32_t expert, std::uint32_t layer = 0) {
    const bool is_started = brain.promote(ModelId(0), LayerIndex(layer), ExpertIndex(expert));
    Texts texts = checked();
    if (!is_started) texts.emplace_back("no room");
    return texts;
  }
  // Leases the experts on `lane`, lets every read succeed and the lease end. REQUIRES: there is room without
  // eviction.
  void make_resident(std::uint32_t lane, Experts experts, std::uint32_t layer = 0) {
    brain.lease(LaneId(lane), LayerIndex(layer), ids(experts), ++seq, ++epoch_);
    std::vector<Command> reads;
    for (const Command& command : brain.take_commands()) {
      ASSERT_NE(command.kind, CommandKind::kUnpublish);
      if (command.kind == CommandKind::kRead) reads.push_back(command);
    }
    for (const Command& command : reads) {
      brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
    }
    brain.epoch_completed(LaneId(lane), epoch_);
    checked();
  }
  [[nodiscard]] const LayerCounters& counters(std::uint32_t layer = 0) const {
    return brain.counters(ModelId(0))[layer];
  }
  [[nodiscard]] std::uint32_t resident(std::uint32_t layer = 0) const {
    return brain.resident(ModelId(0), LayerIndex(layer));
  }
  Texts checked() {
    brain.check_invariants();
    Texts texts;
    for (const Command& command : brain.take_commands()) texts.push_back(to_text(command));
    return texts;
  }
  static std::vector<ExpertIndex> ids(Experts experts) {
    std::vector<ExpertIndex> out;
    for (std::uint32_t value : experts) out.emplace_back(value);
    return out;
  }

  Brain brain;
  std::uint32_t seq = 0;  // of the last lease

 private:
  std::uint64_t epoch_ = 0;
};

}  // namespace moecached
