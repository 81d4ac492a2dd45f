// What prompts may do to the slots: fill free ones, replace each other, and nothing to what decode uses.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "daemon/policy/registry.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;

TEST(Prompt, FillsFreeSlots) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  EXPECT_EQ(b.prompt_lease(0, {1, 2}), (Texts{"read 0/0 expert 1 slot 0", "read 0/0 expert 2 slot 1"}));
  (void)b.read(0);
  EXPECT_EQ(b.read(1), (Texts{"publish 0/0 expert 2 slot 1", "grant lane 0 seq 1 ok"}));
}

TEST(Prompt, ThatNeedsTheSlotOfAnExpertOfDecodeIsToldToStream) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {1, 2});
  EXPECT_EQ(b.prompt_lease(1, {3, 4}), (Texts{"grant lane 1 seq 2 no room"}));
  EXPECT_EQ(b.counters().evictions, 0u);
  EXPECT_EQ(b.prompt_lease(1, {1, 3}), (Texts{"read 0/0 expert 3 slot 2"}))
      << "the free one is enough for this";
}

TEST(Prompt, ReplacesWhatOtherPromptsHaveLoaded) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {1});
  (void)b.prompt_lease(1, {2, 3}, 1);
  (void)b.read(1);
  (void)b.read(2);
  (void)b.completed(1, 1);
  EXPECT_EQ(b.prompt_lease(1, {4, 5}),
            (Texts{"unpublish 0/0 expert 2 slot 1", "unpublish 0/0 expert 3 slot 2"}));
}

TEST(Prompt, WhatItLoadedIsTheFirstToGoWhateverThePolicyThinks) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {1, 2});
  (void)b.prompt_lease(1, {3}, 1);
  (void)b.read(2);
  (void)b.completed(1, 1);
  EXPECT_EQ(b.lease(0, {4}), (Texts{"unpublish 0/0 expert 3 slot 2"})) << "LRU alone would give 1";
}

TEST(Prompt, WhatItLoadedIsDecodesOnceDecodeUsesIt) {
  BrainHarness b({.n_experts = 8, .n_slots = 3});
  b.make_resident(0, {1, 2});
  (void)b.prompt_lease(1, {3}, 1);
  (void)b.read(2);
  (void)b.completed(1, 1);
  (void)b.routed(0, {3});
  EXPECT_EQ(b.prompt_lease(1, {4}), (Texts{"grant lane 1 seq 3 no room"}));
  EXPECT_EQ(b.lease(0, {4}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(Prompt, ALeaseOfDecodeThatJoinsAReadMakesTheExpertDecodes) {
  BrainHarness b({.n_experts = 8, .n_slots = 1});
  (void)b.prompt_lease(0, {3}, 1);
  (void)b.lease(1, {3}, 1);
  (void)b.read(0);
  (void)b.completed(0, 1);
  (void)b.completed(1, 1);
  EXPECT_EQ(b.prompt_lease(0, {4}), (Texts{"grant lane 0 seq 3 no room"}));
}

TEST(Prompt, UsesCountAsLookupsButRefreshNothing) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1});
  b.make_resident(0, {2});
  for (int i = 0; i < 10; ++i) (void)b.prompt_routed(1, {1, 5});
  EXPECT_EQ(b.counters().lookups, 22u);
  EXPECT_EQ(b.counters().hits, 10u);
  EXPECT_EQ(b.lease(0, {3}), (Texts{"unpublish 0/0 expert 1 slot 0"}))
      << "used last by a prompt, least by decode";
}

TEST(Prompt, NeitherQueuesNorOvertakesAQueue) {
  BrainHarness b({.n_experts = 8, .n_slots = 3}, 3);
  (void)b.lease(0, {0, 1});
  EXPECT_EQ(b.lease(1, {2, 3}), Texts{}) << "decode waits for slots";
  EXPECT_EQ(b.prompt_lease(2, {4}), (Texts{"grant lane 2 seq 3 no room"}));
}

TEST(Prompt, AfterLongDisuseAnExpertIsNotDecodesAnyMore) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1, 2});
  for (int i = 0; i < 1024; ++i) (void)b.routed(0, {2});
  EXPECT_EQ(b.prompt_lease(1, {3}), (Texts{"grant lane 1 seq 2 no room"}));
  (void)b.routed(0, {2});
  EXPECT_EQ(b.prompt_lease(1, {3}), (Texts{"unpublish 0/0 expert 1 slot 0"}));
}

TEST(Prompt, PromotesIntoFreeSlotsAlone) {
  BrainHarness b({.n_experts = 8, .n_slots = 2}, 1, "ewma");
  const ModelId model(0);
  const LayerIndex layer(0);
  EXPECT_TRUE(std::isinf(b.brain.promotion_gain(model, layer, ExpertIndex(1), Phase::kPrompt)));
  EXPECT_TRUE(b.brain.promote(model, layer, ExpertIndex(1), Phase::kPrompt));
  (void)b.read(0);
  b.make_resident(0, {2});
  for (int i = 0; i < 50; ++i) (void)b.prompt_routed(0, {3});
  EXPECT_EQ(b.brain.promotion_gain(model, layer, ExpertIndex(3), Phase::kPrompt), 0);
  EXPECT_LE(b.gain(3), 0) << "decode has not used it either";
  (void)b.routed(0, {3});
  (void)b.routed(0, {3});
  EXPECT_GT(b.gain(3), 0);
  EXPECT_EQ(b.promoted(3), (Texts{"unpublish 0/0 expert 1 slot 0"})) << "the prompt's";
}

TEST(Prompt, AnUndoneEvictionGivesAPromptNoSlotOfDecode) {
  BrainHarness b({.n_experts = 8, .n_slots = 2});
  b.make_resident(0, {1});
  (void)b.prompt_lease(1, {2}, 1);
  (void)b.read(1);
  (void)b.completed(1, 1);
  EXPECT_EQ(b.prompt_lease(1, {3}), (Texts{"unpublish 0/0 expert 2 slot 1"}));
  EXPECT_TRUE(b.brain.undo_eviction({ModelId(0), LayerIndex(0), SlotIndex(1), ExpertIndex(2)}, LaneId(0), 9));
  EXPECT_EQ(b.checked(), (Texts{"publish 0/0 expert 2 slot 1", "grant lane 1 seq 3 no room"}));
}

// Decode of a few experts among prompts of everything, by every policy: once resident, decode never misses.
TEST(Prompt, NeverCostsDecodeAHit) {
  for (std::string_view name : policy_names()) {
    BrainHarness b({.n_experts = 32, .n_slots = 8}, 2, std::string(name));
    b.make_resident(0, {0, 1, 2, 3, 4, 5});
    std::mt19937 random(7);
    std::uint64_t epoch = 100;
    std::uint64_t decode_misses = 0, streams = 0, grants = 0;
    for (int i = 0; i < 2000; ++i) {
      std::set<std::uint32_t> set;
      while (set.size() < 1u + static_cast<std::uint32_t>(i) % 6)
        set.insert(static_cast<std::uint32_t>(random() % 32));
      std::vector<ExpertIndex> prompt;
      for (std::uint32_t value : set) prompt.emplace_back(value);
      b.brain.lease(LaneId(1), LayerIndex(0), prompt, 1, ++epoch, Phase::kPrompt);
      for (;;) {
        const auto taken = b.brain.take_commands();
        const std::vector<Command> commands(taken.begin(), taken.end());
        if (commands.empty()) break;
        for (const Command& command : commands) {
          if (command.kind == CommandKind::kUnpublish)
            b.brain.grace_done(command.model, command.layer, command.slot);
          if (command.kind == CommandKind::kRead)
            b.brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
          if (command.kind == CommandKind::kGrant)
            ++(command.status == GrantStatus::kNoRoom ? streams : grants);
        }
      }
      b.brain.epoch_completed(LaneId(1), epoch);
      const std::uint64_t before = b.counters().misses;
      (void)b.routed(0, {random() % 6 < 3 ? 0u : 3u, static_cast<std::uint32_t>(1 + i % 2), 4, 5});
      decode_misses += b.counters().misses - before;
    }
    EXPECT_EQ(decode_misses, 0u) << name;
    EXPECT_GT(streams, 100u) << name;
    EXPECT_GT(grants, 100u) << name;
  }
}

}  // namespace
}  // namespace moecached
