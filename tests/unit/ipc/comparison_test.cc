#include "daemon/ipc/comparison.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "daemon/residency/brain.h"

namespace moecached {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

std::vector<ExpertIndex> experts(std::initializer_list<std::uint32_t> ids) {
  std::vector<ExpertIndex> out;
  for (const std::uint32_t id : ids) out.emplace_back(id);
  return out;
}

ModelShape shape(std::uint32_t n_experts, std::uint32_t n_slots, std::uint32_t n_layers = 1) {
  return {.layers = std::vector<LayerShape>(n_layers, {n_experts, n_slots}), .policy = "lru"};
}

TEST(EventWindow, KeepsTheLatestEventsOfEachLayer) {
  const auto tap = std::make_shared<RoutingTap>(ModelId(1), 1 << 16);
  EventWindow window(tap, 2, 8);
  for (std::uint32_t i = 0; i < 6; ++i)
    tap->put({.lane = i, .layer = LayerIndex(i % 2)}, experts({i, i + 1}));
  window.drain();
  std::size_t n_ids = 0;
  for (const EventWindow::LayerEvents& layer : window.layers()) {
    n_ids += layer.ids.size();
    ASSERT_FALSE(layer.ends.empty());
    EXPECT_EQ(layer.ends.back(), layer.ids.size());
    EXPECT_EQ(layer.ends.size(), layer.hits.size());
  }
  EXPECT_LE(n_ids, 8u);
  EXPECT_EQ(n_ids + window.forgotten(), 12u);
  EXPECT_EQ(window.layers()[1].ids.back(), 6u);
  EXPECT_EQ(window.layers()[1].hits.back(), 5u);
}

TEST(Shadows, BeginWithWhatIsResident) {
  Brain live;
  ASSERT_TRUE(live.add_model(ModelId(1), shape(8, 2)));
  live.lane_opened(LaneId(0), ModelId(1));
  live.lease(LaneId(0), LayerIndex(0), experts({3, 5}), 1, 1);
  for (const SlotIndex slot : {SlotIndex(0), SlotIndex(1)})
    live.read_done(ModelId(1), LayerIndex(0), slot, ReadOutcome::kOk);
  ASSERT_EQ(live.resident(ModelId(1), LayerIndex(0)), 2u);
  auto set = ShadowSet::make(ModelId(1), shape(8, 2), MissMode::kPool, {"ewma", "slru"});
  ASSERT_TRUE(set) << set.error().text;
  Shadows shadows;
  ASSERT_TRUE(shadows.start(*std::move(set), live));
  shadows.event(ModelId(1), LayerIndex(0), experts({3, 5}), Phase::kDecode, 2);
  shadows.event(ModelId(2), LayerIndex(0), experts({3, 5}), Phase::kDecode, 2);  // another model's
  const ShadowSet* found = shadows.find(ModelId(1));
  ASSERT_NE(found, nullptr);
  for (const auto& pool : found->pools) EXPECT_EQ(pool->counters()[0].hits, 2u);
  RoutingEvent event;
  std::vector<std::uint32_t> ids;
  ASSERT_TRUE(found->tap->take(&event, &ids));
  EXPECT_EQ(event.lane, 2u | 2u << 16 | std::uint64_t{2} << 32);
  EXPECT_FALSE(found->tap->take(&event, &ids));
}

TEST(Shadows, RefuseWhatCannotBe) {
  EXPECT_THAT(ShadowSet::make(ModelId(1), shape(8, 2), MissMode::kPool, {}).error().text,
              HasSubstr("1 to 3"));
  EXPECT_FALSE(ShadowSet::make(ModelId(1), shape(8, 2), MissMode::kPool, {"lru", "lru", "lru", "lru"}));
  EXPECT_THAT(ShadowSet::make(ModelId(1), shape(8, 2), MissMode::kPool, {"nonsense"}).error().text,
              HasSubstr("challenger nonsense"));
  auto set = ShadowSet::make(ModelId(1), shape(8, 2), MissMode::kPool, {"lru"});
  Brain live;  // the model is gone
  EXPECT_FALSE(Shadows().start(*std::move(set), live));
}

// Live fifo against challengers on the same events, with a window that holds them all.
PolicyComparison run(std::uint32_t n_slots, int n_events) {
  Shadows shadows;
  Brain live;
  EXPECT_TRUE(live.add_model(ModelId(1), shape(16, n_slots)));
  auto set = ShadowSet::make(ModelId(1), shape(16, n_slots), MissMode::kPool, {"ewma"});
  EXPECT_TRUE(set);
  EventWindow window((*set)->tap, 1);
  EXPECT_TRUE(shadows.start(*std::move(set), live));
  std::mt19937 random(7);
  for (int i = 0; i < n_events; ++i) {
    const auto first = static_cast<std::uint32_t>(std::min({random() % 15, random() % 15, random() % 15}));
    shadows.event(ModelId(1), LayerIndex(0), experts({first, first + 1}), Phase::kDecode, 0);
  }
  window.drain();
  const ShadowSet* found = shadows.find(ModelId(1));
  ShadowSnapshot snapshot;
  snapshot.blocks = {4};
  snapshot.n_expert_used = 2;
  snapshot.shape = shape(16, n_slots);
  snapshot.policies = {"none", "ewma"};
  snapshot.counters.emplace_back(1);
  snapshot.counters.emplace_back(1, found->pools[0]->counters()[0]);
  snapshot.resident.emplace_back(16, 0);
  snapshot.resident.emplace_back(16, 1);
  return compare(snapshot, window);
}

TEST(Comparison, CountsHitsRegretAndCoverageOfTheWindow) {
  const PolicyComparison comparison = run(6, 800);
  ASSERT_EQ(comparison.layers.size(), 1u);
  const LayerComparison& layer = comparison.layers[0];
  EXPECT_EQ(layer.block, 4u);
  EXPECT_EQ(layer.window_lookups, 1600u);
  EXPECT_EQ(layer.policies[0].window_hits, 0u);
  EXPECT_EQ(layer.policies[1].window_hits, layer.policies[1].hits);
  EXPECT_GT(layer.policies[1].hits, 0u);
  EXPECT_GT(layer.belady_hits, layer.policies[1].window_hits);  // nobody is better than who knows the future
  EXPECT_LT(layer.belady_hits_fewer, layer.belady_hits);
  EXPECT_EQ(layer.policies[0].covered, 0u);
  EXPECT_EQ(layer.policies[1].covered, 1600u);
  EXPECT_GT(layer.gini, 0.1);
  EXPECT_GT(layer.entropy_bits, 1);
  ASSERT_EQ(comparison.advice.size(), 1u);
  EXPECT_THAT(comparison.advice[0], HasSubstr("ewma would hit"));
}

TEST(Comparison, AdvisesOnSlots) {
  EXPECT_THAT(run(3, 800).advice.at(0), HasSubstr("3 slots, fewer than twice the 2"));
  EXPECT_THAT(run(16, 20000).advice.at(0), HasSubstr("past the knee"));
  EXPECT_THAT(run(6, 10).advice.at(0), HasSubstr("too few to judge by"));
}

}  // namespace
}  // namespace moecached
