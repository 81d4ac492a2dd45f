// The peer tier in the brain: experts of one model are spread over GPUs that read each other's slots.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kCost = 0.125;  // of a use that a peer's slot serves

// One layer of a model on several GPUs, model g and lane g on GPU g, all reading each other's slots.
class Peers {
 public:
  Peers(std::uint32_t n_gpus, LayerShape layer, const char* policy = "ewma") : n_gpus_(n_gpus) {
    ModelShape shape;
    shape.layers.push_back(layer);
    shape.policy = policy;
    std::vector<ModelId> all;
    for (std::uint32_t g = 0; g < n_gpus; ++g) {
      EXPECT_TRUE(brain.add_model(ModelId(g), shape));
      brain.lane_opened(LaneId(g), ModelId(g));
      all.emplace_back(g);
    }
    for (const ModelId model : all)
      brain.set_peers(model, all, kCost);  // itself among them, which is no peer
  }
  void use(std::uint32_t gpu, BrainHarness::Experts experts) {
    brain.routed(LaneId(gpu), LayerIndex(0), BrainHarness::ids(experts));
  }
  [[nodiscard]] double gain(std::uint32_t gpu, std::uint32_t expert, Phase phase = Phase::kDecode) {
    return brain.promotion_gain(ModelId(gpu), LayerIndex(0), ExpertIndex(expert), phase);
  }
  // To the end: as if grace periods and copies took no time.
  bool promote(std::uint32_t gpu, std::uint32_t expert) {
    if (!brain.promote(ModelId(gpu), LayerIndex(0), ExpertIndex(expert))) return false;
    settle();
    return true;
  }
  void settle() {
    std::vector<Command> commands;
    for (bool is_busy = true; is_busy;) {
      commands.clear();
      for (const Command& command : brain.take_commands()) commands.push_back(command);
      is_busy = !commands.empty();
      for (const Command& command : commands) {
        if (command.kind == CommandKind::kUnpublish)
          brain.grace_done(command.model, command.layer, command.slot);
        if (command.kind == CommandKind::kRead)
          brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
      }
    }
    brain.check_invariants();
  }
  [[nodiscard]] bool has(std::uint32_t gpu, std::uint32_t expert) const {
    return brain.is_resident(ModelId(gpu), LayerIndex(0), ExpertIndex(expert));
  }
  [[nodiscard]] std::uint32_t copies(std::uint32_t expert) const {
    std::uint32_t n = 0;
    for (std::uint32_t g = 0; g < n_gpus_; ++g) n += has(g, expert) ? 1 : 0;
    return n;
  }

  Brain brain;

 private:
  const std::uint32_t n_gpus_;
};

TEST(PeersOfTheBrain, WhatAPeerHasGainsALittleEvenInAFreeSlot) {
  Peers p(2, {.n_experts = 8, .n_slots = 2});
  ASSERT_TRUE(p.promote(0, 3));
  EXPECT_EQ(p.gain(1, 5), kInfinite);
  for (int i = 0; i < 200; ++i) p.use(1, {3});
  EXPECT_NEAR(p.gain(1, 3), kCost, 0.01) << "used by every token";
  EXPECT_EQ(p.gain(1, 3, Phase::kPrompt), 0);
  EXPECT_TRUE(p.brain.is_elsewhere(ModelId(1), LayerIndex(0), ExpertIndex(3)));
  EXPECT_FALSE(p.brain.is_elsewhere(ModelId(0), LayerIndex(0), ExpertIndex(3)));
}

TEST(PeersOfTheBrain, UsesOnOneGpuKeepAnExpertOnAnother) {
  Peers p(2, {.n_experts = 8, .n_slots = 2});
  ASSERT_TRUE(p.promote(0, 3));
  ASSERT_TRUE(p.promote(0, 4));
  for (int i = 0; i < 50; ++i) p.use(1, {3});  // read there, from GPU 0
  for (int i = 0; i < 50; ++i) p.use(0, {5});
  ASSERT_TRUE(p.promote(0, 5));
  EXPECT_TRUE(p.has(0, 3)) << "the other GPU reads it";
  EXPECT_FALSE(p.has(0, 4));
  EXPECT_EQ(p.brain.counters(ModelId(0))[0].lookups, 50u) << "the other's lookups are not its own";
}

TEST(PeersOfTheBrain, OfTwoCopiesOneGoesBeforeAnExpertThatIsNowhereElse) {
  Peers p(2, {.n_experts = 8, .n_slots = 2});
  ASSERT_TRUE(p.promote(0, 0));
  ASSERT_TRUE(p.promote(0, 1));
  ASSERT_TRUE(p.promote(1, 0));
  // 0 is used more than 1, but its second copy is worth an eighth.
  for (int i = 0; i < 100; ++i) p.use(0, {0});
  for (int i = 0; i < 30; ++i) p.use(0, {1, 0});
  for (int i = 0; i < 30; ++i) p.use(0, {5, 0});
  EXPECT_GT(p.gain(0, 5), 0.04);
  ASSERT_TRUE(p.promote(0, 5));
  EXPECT_FALSE(p.has(0, 0));
  EXPECT_TRUE(p.has(0, 1));
  EXPECT_TRUE(p.has(1, 0));
}

TEST(PeersOfTheBrain, AnExpertThatEveryTokenUsesIsWorthACopyOfItsOwn) {
  Peers p(2, {.n_experts = 16, .n_slots = 2});
  ASSERT_TRUE(p.promote(0, 7));
  ASSERT_TRUE(p.promote(1, 1));
  ASSERT_TRUE(p.promote(1, 2));
  for (int i = 0; i < 200; ++i) p.use(1, {7});  // 1 and 2 are not used at all
  EXPECT_GT(p.gain(1, 7), 0.04);
  ASSERT_TRUE(p.promote(1, 7));
  EXPECT_EQ(p.copies(7), 2u);
}

TEST(PeersOfTheBrain, ASecondCopyIsWorthWhatItsOwnGpuUsesOfIt) {
  Peers p(2, {.n_experts = 16, .n_slots = 2});
  ASSERT_TRUE(p.promote(0, 7));
  for (int i = 0; i < 200; ++i) p.use(0, {7});
  EXPECT_EQ(p.gain(1, 7), 0) << "only the GPU that has it uses it";
  for (int i = 0; i < 200; ++i) {
    p.use(0, {7});
    p.use(1, {7});
  }
  EXPECT_NEAR(p.gain(1, 7), kCost, 0.02) << "by a token of its own, not of all";
}

TEST(PeersOfTheBrain, APeerThatIsRemovedIsReadNoMore) {
  Peers p(2, {.n_experts = 8, .n_slots = 1});
  ASSERT_TRUE(p.promote(1, 3));
  p.brain.lane_closed(LaneId(1));
  p.brain.remove_model(ModelId(1));
  EXPECT_FALSE(p.brain.is_elsewhere(ModelId(0), LayerIndex(0), ExpertIndex(3)));
  EXPECT_EQ(p.gain(0, 3), kInfinite);
  p.use(0, {3});  // tells nobody that is gone
}

// Skewed use, the same on every GPU; each promotes what it misses, where that gains as much as it has to in
// the daemon. Returns the share of lookups that hit a slot somewhere.
double hits_anywhere(std::uint32_t n_gpus, bool are_peers, const char* policy) {
  constexpr std::uint32_t kExperts = 64;
  Peers p(n_gpus, {.n_experts = kExperts, .n_slots = 8}, policy);
  if (!are_peers) {
    for (std::uint32_t g = 0; g < n_gpus; ++g) p.brain.set_peers(ModelId(g), {}, 1);
  }
  std::mt19937 random(5);
  std::uint64_t hits = 0, lookups = 0;
  for (int step = 0; step < 4000; ++step) {
    const std::uint32_t gpu = static_cast<std::uint32_t>(step) % n_gpus;
    // The smaller of two: the chance of expert e falls evenly with e.
    const auto expert = static_cast<std::uint32_t>(std::min(random() % kExperts, random() % kExperts));
    const bool is_hit = are_peers ? p.copies(expert) > 0 : p.has(gpu, expert);
    if (step >= 2000) {
      ++lookups;
      hits += is_hit;
    }
    p.use(gpu, {expert});
    if (p.gain(gpu, expert) >= 0.001) (void)p.promote(gpu, expert);
  }
  return static_cast<double>(hits) / static_cast<double>(lookups);
}

TEST(PeersOfTheBrain, TogetherTheyHoldMoreExpertsThanEachAloneForAnyNumberOfGpusAndPolicy) {
  for (const char* policy : {"ewma", "lru", "slru", "lfu:halve=64"}) {
    const double alone = hits_anywhere(1, true, policy);
    double before = alone;
    for (const std::uint32_t n_gpus : {2u, 4u, 8u}) {
      const double together = hits_anywhere(n_gpus, true, policy);
      EXPECT_GT(together, before + 0.05) << policy << ", " << n_gpus << " GPUs";
      EXPECT_GT(together, hits_anywhere(n_gpus, false, policy) + 0.05) << policy << ", " << n_gpus << " GPUs";
      before = together;
    }
  }
}

}  // namespace
}  // namespace moecached
