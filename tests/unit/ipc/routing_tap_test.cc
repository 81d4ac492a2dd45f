#include "daemon/ipc/routing_tap.h"

#include <gmock/gmock.h>

#include <thread>

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;

std::vector<ExpertIndex> experts(std::initializer_list<std::uint32_t> ids) {
  std::vector<ExpertIndex> out;
  for (const std::uint32_t id : ids) out.emplace_back(id);
  return out;
}

RoutingEvent of_lane(std::uint64_t lane) {
  RoutingEvent event;
  event.lane = lane;
  return event;
}

TEST(RoutingTap, GivesBackWhatWasPut) {
  RoutingTap tap(ModelId(1), 4096);
  RoutingEvent event;
  std::vector<std::uint32_t> ids;
  EXPECT_FALSE(tap.take(&event, &ids));
  tap.put(
      {.lane = 17, .graph = 1ull << 40, .layer = LayerIndex(3), .token = 5, .n_tokens = 9, .prefill = true},
      experts({4095, 0, 7, 8, 1}));
  tap.put(of_lane(18), experts({2}));
  ASSERT_TRUE(tap.take(&event, &ids));
  EXPECT_EQ(event.lane, 17u);
  EXPECT_EQ(event.graph, 1ull << 40);
  EXPECT_EQ(event.layer, LayerIndex(3));
  EXPECT_EQ(event.token, 5u);
  EXPECT_EQ(event.n_tokens, 9u);
  EXPECT_TRUE(event.prefill);
  EXPECT_THAT(ids, ElementsAre(4095, 0, 7, 8, 1));
  ASSERT_TRUE(tap.take(&event, &ids));
  EXPECT_EQ(event.lane, 18u);
  EXPECT_FALSE(event.prefill);
  EXPECT_THAT(ids, ElementsAre(2));
  EXPECT_FALSE(tap.take(&event, &ids));
}

TEST(RoutingTap, WhatFindsNoRoomIsCountedAndTheRestStaysWhole) {
  RoutingTap tap(ModelId(1), 512);  // 64 words: 9 events of 7
  for (std::uint32_t i = 0; i < 20; ++i) tap.put(of_lane(i), experts({i, i + 1}));
  EXPECT_EQ(tap.dropped(), 11u);
  RoutingEvent event;
  std::vector<std::uint32_t> ids;
  for (std::uint32_t i = 0; i < 9; ++i) {
    ASSERT_TRUE(tap.take(&event, &ids));
    EXPECT_EQ(event.lane, i);
    EXPECT_THAT(ids, ElementsAre(i, i + 1));
  }
  EXPECT_FALSE(tap.take(&event, &ids));
  tap.put(of_lane(99), experts({1}));  // there is room again
  ASSERT_TRUE(tap.take(&event, &ids));
  EXPECT_EQ(event.lane, 99u);
}

TEST(RoutingTap, OrderAndContentsHoldWhileTheOtherSideReads) {
  constexpr std::uint32_t kEvents = 200'000;
  RoutingTap tap(ModelId(1), 1u << 14);
  std::thread loop([&] {
    std::vector<ExpertIndex> ids;
    for (std::uint32_t i = 0; i < kEvents; ++i) {
      ids.clear();
      for (std::uint32_t n = 0; n <= i % 13; ++n) ids.emplace_back((i + n) % 4096);
      RoutingEvent event = of_lane(i);
      event.layer = LayerIndex(i % 48);
      tap.put(event, ids);
    }
  });
  RoutingEvent event;
  std::vector<std::uint32_t> ids, wanted;
  std::uint64_t taken = 0, next = 0;
  while (taken + tap.dropped() < kEvents) {
    if (!tap.take(&event, &ids)) continue;
    ++taken;
    ASSERT_GE(event.lane, next);
    next = event.lane + 1;
    wanted.clear();
    for (std::uint32_t n = 0; n <= event.lane % 13; ++n)
      wanted.push_back(static_cast<std::uint32_t>((event.lane + n) % 4096));
    ASSERT_THAT(ids, ElementsAreArray(wanted));
    ASSERT_EQ(event.layer.value, event.lane % 48);
  }
  loop.join();
  EXPECT_GT(taken, 0u);
}

TEST(RoutingTaps, EachGetsItsModelAndNothingAfterItIsClosed) {
  RoutingTaps taps;
  const auto first = std::make_shared<RoutingTap>(ModelId(1), 4096);
  const auto second = std::make_shared<RoutingTap>(ModelId(2), 4096);
  taps.open(first);
  taps.open(second);
  taps.put(ModelId(2), of_lane(5), experts({1}));
  taps.close(second);
  taps.put(ModelId(2), of_lane(6), experts({1}));
  RoutingEvent event;
  std::vector<std::uint32_t> ids;
  EXPECT_FALSE(first->take(&event, &ids));
  ASSERT_TRUE(second->take(&event, &ids));
  EXPECT_EQ(event.lane, 5u);
  EXPECT_FALSE(second->take(&event, &ids));
  for (std::size_t i = 1; i < RoutingTaps::kMax; ++i) taps.open(second);
  EXPECT_TRUE(taps.is_full());
}

}  // namespace
}  // namespace moecached
