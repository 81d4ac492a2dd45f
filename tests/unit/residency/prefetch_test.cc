// What decode is expected to use next is read before it is asked for: which, in whose place, and what becomes
// of it. Two layers of eight experts; a token of kind t uses experts 2t, 2t + 1 of both.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/residency/instant_pool.h"
#include "tests/unit/residency/brain_harness.h"

namespace moecached {
namespace {

using Texts = BrainHarness::Texts;
using testing::IsEmpty;

constexpr PrefetchPace kQuick{
    .learn_tokens = 32, .window = 64, .pause_tokens_min = 64, .pause_tokens_max = 1024};

ModelShape two_layers(std::uint32_t n_slots) {
  return {.layers = {{.n_experts = 8, .n_slots = 8}, {.n_experts = 8, .n_slots = n_slots}},
          .policy = "lru",
          .prefetch = true,
          .prefetch_pace = kQuick};
}

// A brain that knows that kinds follow themselves from layer 0 to layer 1, and expects nothing else. Layer 0
// holds everything, so only layer 1 is prefetched.
class Taught : public BrainHarness {
 public:
  explicit Taught(std::uint32_t n_slots = 4, std::uint32_t n_lanes = 2)
      : BrainHarness(two_layers(n_slots), n_lanes) {
    std::mt19937 random(1);
    for (int i = 0; i < 400 || !is_on(); ++i) {
      if (i > 2000) {
        ADD_FAILURE() << "it has not learnt";
        return;
      }
      token(random() % 4);
    }
    // Kinds 0 and 1 lie in layer 1, the older one is 0.
    for (const std::uint32_t kind : {2u, 3u, 0u, 1u}) token(kind);
    before = counters(1);
  }
  [[nodiscard]] bool is_on() const { return brain.prefetch(ModelId(0)) == PrefetchState::kOn; }
  // Both layers, every read at once.
  void token(std::uint32_t kind) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const bool is_whole = layer == 0 && resident(0) == 8;
      const ExpertIndex set[] = {ExpertIndex(2 * kind), ExpertIndex(2 * kind + 1)};
      if (is_whole) {
        brain.routed(LaneId(0), LayerIndex(0), set);
      } else {
        brain.lease(LaneId(0), LayerIndex(layer), set, ++seq, ++epoch);
      }
      finish();
      brain.epoch_completed(LaneId(0), epoch);
      brain.check_invariants();
    }
  }
  void finish() {
    for (;;) {
      const auto taken = brain.take_commands();
      const std::vector<Command> commands(taken.begin(), taken.end());
      if (commands.empty()) return;
      for (const Command& each : commands) {
        if (each.kind == CommandKind::kUnpublish) brain.grace_done(each.model, each.layer, each.slot);
        if (each.kind == CommandKind::kRead)
          brain.read_done(each.model, each.layer, each.slot, ReadOutcome::kOk);
      }
    }
  }
  // Ends the grace periods that these texts begin, and the reads that follow.
  void read_behind(const Texts& unpublished, ReadOutcome outcome = ReadOutcome::kOk) {
    for (const std::string& text : unpublished) {
      EXPECT_THAT(graced(slot_in(text), 1), testing::ElementsAre(testing::HasSubstr("read ahead 0/1 ")));
      (void)read(slot_in(text), outcome, 1);
    }
  }
  [[nodiscard]] static std::uint32_t slot_in(const std::string& text) {
    return static_cast<std::uint32_t>(std::stoul(text.substr(text.rfind(' ') + 1)));
  }
  [[nodiscard]] std::uint64_t grown(std::uint64_t LayerCounters::*counter) const {
    return counters(1).*counter - before.*counter;
  }

  std::uint64_t epoch = 0;
  LayerCounters before;
};

TEST(Prefetch, ReadsWhatTheNextLayerIsLikelyToUseInThePlaceOfWhatItIsNot) {
  Taught b;
  const Texts texts = b.routed(0, {4, 5}, 0);  // kind 2: layer 1 holds 0 to 3
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_THAT(texts[0], testing::StartsWith("unpublish 0/1 expert 0 "));
  EXPECT_THAT(texts[1], testing::StartsWith("unpublish 0/1 expert 1 "));
  EXPECT_EQ(b.grown(&LayerCounters::prefetched), 2u);
  EXPECT_EQ(b.counters(1).leases, b.before.leases) << "nobody has asked";
}

TEST(Prefetch, ALeaseForetellsAsWellBehindWhatItAsksFor) {
  Taught b;
  const Texts texts = b.lease(1, {4, 5}, BrainHarness::kFar, 0);
  ASSERT_EQ(texts.size(), 3u);
  EXPECT_THAT(texts[0], testing::StartsWith("grant"));
  EXPECT_THAT(texts[1], testing::StartsWith("unpublish 0/1"));
  EXPECT_THAT(texts[2], testing::StartsWith("unpublish 0/1"));
}

TEST(Prefetch, UsedInTimeIsAHitAndCounted) {
  Taught b;
  b.read_behind(b.routed(0, {4, 5}, 0));
  EXPECT_THAT(b.routed(0, {4, 5}, 1), IsEmpty());
  EXPECT_EQ(b.grown(&LayerCounters::hits), 2u);
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_used), 2u);
  EXPECT_THAT(b.routed(0, {4, 5}, 1), IsEmpty());
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_used), 2u) << "once";
}

TEST(Prefetch, ALeaseJoinsAReadUnderWayAndHastensIt) {
  Taught b;
  const Texts emptied = b.routed(0, {4, 5}, 0);
  ASSERT_EQ(emptied.size(), 2u);
  const Texts ahead = b.graced(Taught::slot_in(emptied[0]), 1);
  ASSERT_EQ(ahead.size(), 1u);
  const Texts hastened = b.lease(0, {4, 5}, BrainHarness::kFar, 1);
  ASSERT_EQ(hastened.size(), 1u) << "the other one is not being read yet";
  EXPECT_EQ(ahead[0], "read ahead" + hastened[0].substr(std::string("hasten").size()));
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_late), 2u);
  EXPECT_EQ(b.grown(&LayerCounters::misses), 2u);
  EXPECT_EQ(b.grown(&LayerCounters::prefetched), 2u) << "nothing is read twice";
  EXPECT_THAT(b.graced(Taught::slot_in(emptied[1]), 1),
              testing::ElementsAre(testing::StartsWith("read 0/1 expert ")))
      << "somebody waits by now";
}

TEST(Prefetch, EvictedUnusedIsWastedAndAMissOfItsVictimRegretted) {
  Taught b;
  b.read_behind(b.routed(0, {4, 5}, 0));
  // The token uses 0 and 1 after all, which had to go.
  (void)b.lease(0, {0, 1}, ++b.epoch, 1);
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_regretted), 2u);
  for (std::uint32_t slot = 0; slot < 4; ++slot) {
    (void)b.graced(slot, 1);
    (void)b.read(slot, ReadOutcome::kOk, 1);
  }
  (void)b.completed(0, b.epoch);
  const std::uint64_t started = b.grown(&LayerCounters::prefetched);
  for (const std::uint32_t kind : {3u, 1u, 0u, 3u}) b.token(kind);
  EXPECT_GE(b.grown(&LayerCounters::prefetch_wasted), 2u);
  EXPECT_GT(b.grown(&LayerCounters::prefetched), started);
}

TEST(Prefetch, TakesFreeSlotsWithoutEvicting) {
  Taught b(6);
  ASSERT_TRUE(b.brain.is_absent(ModelId(0), LayerIndex(1), ExpertIndex(4)));
  // A failed read leaves a slot free.
  (void)b.lease(1, {4}, 1, 1);
  for (std::uint32_t slot = 0; slot < 6; ++slot) {
    if (!b.graced(slot, 1).empty()) (void)b.read(slot, ReadOutcome::kIoError, 1);
  }
  ASSERT_EQ(b.brain.free_slots(ModelId(0), LayerIndex(1)), 1u);
  const std::uint64_t evictions = b.counters(1).evictions;
  const Texts texts = b.routed(0, {4, 5}, 0);
  ASSERT_FALSE(texts.empty());
  EXPECT_THAT(texts[0], testing::StartsWith("read ahead 0/1 expert "));
  EXPECT_LE(b.counters(1).evictions, evictions + 1);
}

TEST(Prefetch, NeverTakesWhatIsLeasedOrHeld) {
  Taught b;
  (void)b.lease(1, {0, 1}, BrainHarness::kFar, 1);
  b.brain.hold(LaneId(1), LayerIndex(1), BrainHarness::ids({2, 3}), BrainHarness::kFar);
  b.checked();
  EXPECT_THAT(b.routed(0, {4, 5}, 0), IsEmpty());
  EXPECT_EQ(b.grown(&LayerCounters::prefetched), 0u);
}

TEST(Prefetch, NeverTakesWhatTheSameTokenIsExpectedToUse) {
  Taught b;
  // The token is of two kinds at once: what lies there is as likely as what does not.
  const Texts texts = b.routed(0, {0, 1, 4, 5}, 0);
  for (const std::string& text : texts) {
    EXPECT_THAT(text, testing::Not(testing::StartsWith("unpublish 0/1 expert 0 ")));
    EXPECT_THAT(text, testing::Not(testing::StartsWith("unpublish 0/1 expert 1 ")));
  }
}

TEST(Prefetch, StartsNothingWhereALeaseWaits) {
  Taught b(4, 4);
  (void)b.lease(1, {0, 1}, BrainHarness::kFar, 1);
  (void)b.lease(2, {2, 3}, BrainHarness::kFar, 1);
  EXPECT_THAT(b.lease(3, {6, 7}, BrainHarness::kFar, 1), IsEmpty()) << "it queues";
  (void)b.completed(0, b.epoch);
  EXPECT_THAT(b.routed(0, {4, 5}, 0), IsEmpty());
}

TEST(Prefetch, PromptsNeitherForetellNorTeach) {
  Taught b;
  EXPECT_THAT(b.prompt_routed(0, {4, 5}), IsEmpty());
  EXPECT_EQ(b.grown(&LayerCounters::prefetched), 0u);
}

TEST(Prefetch, AWideBatchForetellsNothing) {
  Brain brain;
  ModelShape shape{.layers = {{32, 32}, {32, 20}},
                   .policy = "lru",
                   .prefetch = true,
                   .prefetch_pace = {.learn_tokens = 1}};
  ASSERT_TRUE(brain.add_model(ModelId(0), shape));
  brain.lane_opened(LaneId(0), ModelId(0));
  std::vector<ExpertIndex> wide;
  for (std::uint32_t e = 0; e < 17; ++e) wide.emplace_back(e);
  for (int i = 0; i < 1000; ++i) {
    brain.routed(LaneId(0), LayerIndex(0), wide);
    brain.routed(LaneId(0), LayerIndex(1), wide);
  }
  EXPECT_EQ(brain.prefetch(ModelId(0)), PrefetchState::kProbing);
  EXPECT_EQ(brain.counters(ModelId(0))[1].prefetched, 0u);
}

TEST(Prefetch, AnEvictionThatIsUndoneGivesThePrefetchUp) {
  Taught b;
  const Texts texts = b.routed(0, {4, 5}, 0);
  ASSERT_EQ(texts.size(), 2u);
  std::uint32_t slot = 0;
  for (; slot < 4; ++slot) {
    if (texts[0] == "unpublish 0/1 expert 0 slot " + std::to_string(slot)) break;
  }
  ASSERT_TRUE(b.brain.undo_eviction({ModelId(0), LayerIndex(1), SlotIndex(slot), ExpertIndex(0)}, LaneId(1),
                                    BrainHarness::kFar));
  EXPECT_EQ(b.checked(), (Texts{"publish 0/1 expert 0 slot " + std::to_string(slot)})) << "no other victim";
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_wasted), 1u);
}

TEST(Prefetch, AFailedReadIsWaste) {
  Taught b;
  b.read_behind(b.routed(0, {4, 5}, 0), ReadOutcome::kIoError);
  EXPECT_EQ(b.grown(&LayerCounters::prefetch_wasted), 2u);
  EXPECT_EQ(b.brain.free_slots(ModelId(0), LayerIndex(1)), 2u);
}

// ----------------------------------------------------------------------------------------------------------
// over long runs, with reads that take no time

class LongRun {
 public:
  explicit LongRun(bool prefetch) {
    auto made = InstantPool::create({.layers = {{16, 6}, {16, 6}, {16, 6}},
                                     .policy = "slru",
                                     .prefetch = prefetch,
                                     .prefetch_pace = kQuick},
                                    MissMode::kPool);
    EXPECT_TRUE(made);
    pool = *std::move(made);
  }
  // follows: what a layer uses is that of the one before, one further.
  void tokens(int n, bool follows) {
    for (int i = 0; i < n; ++i) {
      std::uint32_t at = random() % 16;
      for (std::uint32_t layer = 0; layer < 3; ++layer) {
        const ExpertIndex set[] = {ExpertIndex(at), ExpertIndex((at + 1) % 16)};
        lookups += 2;
        hits += pool->event(LaneId(0), LayerIndex(layer), set).hits;
        at = follows ? (at + 3) % 16 : random() % 16;
      }
    }
  }
  [[nodiscard]] LayerCounters sum() const {
    LayerCounters out;
    for (const LayerCounters& layer : pool->counters()) {
      out.prefetched += layer.prefetched;
      out.prefetch_used += layer.prefetch_used;
      out.prefetch_wasted += layer.prefetch_wasted;
    }
    return out;
  }
  std::unique_ptr<InstantPool> pool;
  std::mt19937 random{7};
  std::uint64_t lookups = 0, hits = 0;
};

TEST(Prefetch, PaysWhereLayersFollowFromEachOther) {
  LongRun with(true), without(false);
  with.tokens(3000, true);
  without.tokens(3000, true);
  EXPECT_EQ(with.pool->prefetch(), PrefetchState::kOn);
  EXPECT_GT(with.hits, without.hits + without.lookups / 4);
  const LayerCounters sum = with.sum();
  EXPECT_GT(sum.prefetch_used, 9 * sum.prefetch_wasted);
  EXPECT_EQ(without.pool->prefetch(), PrefetchState::kOff);
}

TEST(Prefetch, StartsNearlyNothingWhereRoutingIsRandom) {
  LongRun with(true), without(false);
  with.tokens(10'000, false);
  without.tokens(10'000, false);
  EXPECT_LT(with.sum().prefetched, with.lookups / 500);
  EXPECT_GE(with.hits + with.lookups / 500, without.hits);
}

// An enemy: routing that follows until it is trusted, and then goes elsewhere.
TEST(Prefetch, StopsWhereItIsLedAstrayAndTriesAgainLater) {
  LongRun run(true);
  bool was_paused = false, was_on_again = false;
  std::uint64_t while_paused = 0;
  for (int i = 0; i < 3000 && !was_on_again; ++i) {
    const PrefetchState state = run.pool->prefetch();
    const std::uint64_t before = run.sum().prefetched;
    // What it expects does not come as long as it acts on it; once it has stopped, all is well again.
    run.tokens(8, state != PrefetchState::kOn);
    if (state == PrefetchState::kPaused && run.pool->prefetch() == state)
      while_paused += run.sum().prefetched - before;
    was_on_again = was_paused && state == PrefetchState::kOn;
    was_paused = was_paused || state == PrefetchState::kPaused;
  }
  EXPECT_TRUE(was_paused);
  EXPECT_TRUE(was_on_again);
  EXPECT_EQ(while_paused, 0u);
}

}  // namespace
}  // namespace moecached
