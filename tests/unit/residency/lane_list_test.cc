#include "daemon/residency/lane_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace moecached {
namespace {

std::vector<std::uint32_t> walk(const LaneList& list, std::span<const LaneLink> links) {
  std::vector<std::uint32_t> out;
  for (std::uint32_t at = list.first(); at != LaneList::kNone; at = LaneList::next(links, at))
    out.push_back(at);
  return out;
}

TEST(LaneList, ServesInTheOrderOfArrival) {
  std::vector<LaneLink> links(4);
  LaneList list;
  EXPECT_TRUE(list.empty());
  for (std::uint32_t lane : {2, 0, 3}) list.push_back(links, LaneId(lane));
  EXPECT_EQ(list.front().value, 2u);
  EXPECT_EQ(walk(list, links), (std::vector<std::uint32_t>{2, 0, 3}));
}

TEST(LaneList, ServesTheLaneThatIsPutInFrontFirst) {
  std::vector<LaneLink> links(4);
  LaneList list;
  list.push_front(links, LaneId(1));
  list.push_back(links, LaneId(2));
  list.push_front(links, LaneId(3));
  EXPECT_EQ(walk(list, links), (std::vector<std::uint32_t>{3, 1, 2}));
  list.remove(links, LaneId(3));
  list.remove(links, LaneId(2));
  list.push_back(links, LaneId(0));
  EXPECT_EQ(walk(list, links), (std::vector<std::uint32_t>{1, 0}));
}

TEST(LaneList, LetsALaneLeaveFromAnyPlace) {
  for (std::uint32_t leaving : {0, 1, 2}) {
    std::vector<LaneLink> links(3);
    LaneList list;
    std::vector<std::uint32_t> expected;
    for (std::uint32_t lane = 0; lane < 3; ++lane) {
      list.push_back(links, LaneId(lane));
      if (lane != leaving) expected.push_back(lane);
    }
    list.remove(links, LaneId(leaving));
    EXPECT_EQ(walk(list, links), expected);
    list.push_back(links, LaneId(leaving));
    expected.push_back(leaving);
    EXPECT_EQ(walk(list, links), expected);
  }
}

TEST(LaneList, AgreesWithAVectorWhenLanesMoveBetweenTwoLists) {
  constexpr std::uint32_t kLanes = 10;
  std::mt19937 random(3);
  std::vector<LaneLink> links(kLanes);
  LaneList lists[2];
  std::vector<std::uint32_t> models[2];
  for (int round = 0; round < 5000; ++round) {
    const std::uint32_t lane = static_cast<std::uint32_t>(random() % kLanes);
    bool was_in_one = false;
    for (int i = 0; i < 2; ++i) {
      if (std::erase(models[i], lane) == 0) continue;
      lists[i].remove(links, LaneId(lane));
      was_in_one = true;
    }
    if (!was_in_one) {
      const std::size_t to = random() % 2;
      lists[to].push_back(links, LaneId(lane));
      models[to].push_back(lane);
    }
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(walk(lists[i], links), models[i]);
      ASSERT_EQ(lists[i].empty(), models[i].empty());
    }
  }
}

}  // namespace
}  // namespace moecached
