// Counts every allocation of this program: routing is reported for every token, so it must cost none.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "daemon/residency/brain.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

// Not inlined: GCC 12 takes the two halves, seen apart, for a mismatched pair (-Wmismatched-new-delete).
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace moecached {
namespace {

TEST(BrainEvents, OfRoutingAllocateNothingAndLeasesNothingOnceTheCommandListHasItsSize) {
  constexpr std::uint32_t kExperts = 32, kSlots = 8;
  Brain brain;
  const LayerShape shape{
      .n_experts = kExperts, .n_slots = kSlots, .n_slots_max = 2 * kSlots, .slot_class = 0};
  ASSERT_TRUE(brain.add_model(
      ModelId(0),
      {.layers = {shape, shape}, .policy = "slru", .scope = SlotScope::kGlobal, .n_expert_used = 2}));
  brain.lane_opened(LaneId(0), ModelId(0));
  std::uint64_t epoch = 0, n_moves = 0;
  std::vector<Command> todo;
  todo.reserve(256);
  const auto one_round = [&](std::uint32_t i) {
    const ExpertIndex set[] = {ExpertIndex(i % kExperts), ExpertIndex((i + 3) % kExperts)};
    brain.lease(LaneId(0), LayerIndex(0), set, i, ++epoch);
    (void)brain.trade_slots(ModelId(0), LayerIndex(0));
    n_moves += brain.move_slot(ModelId(0), LayerIndex(i % 2), LayerIndex(1 - i % 2)) ? 1 : 0;
    for (auto commands = brain.take_commands(); !commands.empty(); commands = brain.take_commands()) {
      todo.assign(commands.begin(), commands.end());
      for (const Command& command : todo) {
        if (command.kind == CommandKind::kUnpublish)
          brain.grace_done(command.model, command.layer, command.slot);
        if (command.kind == CommandKind::kRead) {
          brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
        }
      }
    }
    brain.routed(LaneId(0), LayerIndex(0), set);
    brain.routed(LaneId(0), LayerIndex(1), {set, 1});
    brain.epoch_completed(LaneId(0), epoch);
  };
  for (std::uint32_t i = 0; i < 100; ++i) one_round(i);
  const std::uint64_t before = allocations.load();
  for (std::uint32_t i = 100; i < 2000; ++i) one_round(i);
  EXPECT_EQ(allocations.load(), before);
  EXPECT_GT(brain.counters(ModelId(0))[0].evictions, 1000u);
  EXPECT_GT(n_moves, 1000u);
  EXPECT_GT(before, 0u) << "the counter does not count";
}

TEST(BrainEvents, OfMovesIntoDeviceSlotsAllocateNothing) {
  constexpr std::uint32_t kExperts = 32;
  Brain brain;
  ASSERT_TRUE(
      brain.add_model(ModelId(0), {.layers = {{.n_experts = kExperts, .n_slots = 16}}, .policy = "slru"}));
  brain.lane_opened(LaneId(0), ModelId(0));
  brain.open_device_slots(ModelId(0), LayerIndex(0), 8);
  std::uint64_t epoch = 0;
  std::vector<Command> todo;
  todo.reserve(256);
  const auto one_round = [&](std::uint32_t i) {
    const ExpertIndex set[] = {ExpertIndex(i % kExperts), ExpertIndex((i + 3) % kExperts)};
    brain.lease(LaneId(0), LayerIndex(0), set, i, ++epoch);
    (void)brain.rise(ModelId(0), LayerIndex(0), set, -1, 0);
    for (auto commands = brain.take_commands(); !commands.empty(); commands = brain.take_commands()) {
      todo.assign(commands.begin(), commands.end());
      for (const Command& command : todo) {
        if (command.kind == CommandKind::kUnpublish)
          brain.grace_done(command.model, command.layer, command.slot);
        if (command.kind == CommandKind::kMove) brain.grace_done(command.model, command.layer, command.from);
        if (command.kind == CommandKind::kCopyUp || command.kind == CommandKind::kCopyAside)
          brain.moved(command.model, command.layer, command.slot);
        if (command.kind == CommandKind::kRead)
          brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
      }
    }
    brain.epoch_completed(LaneId(0), epoch);
  };
  for (std::uint32_t i = 0; i < 200; ++i) one_round(i);
  const std::uint64_t before = allocations.load();
  for (std::uint32_t i = 200; i < 2000; ++i) one_round(i);
  EXPECT_EQ(allocations.load(), before);
  EXPECT_GT(brain.counters(ModelId(0))[0].swaps, 500u);
}

}  // namespace
}  // namespace moecached
