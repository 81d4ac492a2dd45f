#include "daemon/ipc/grace.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace moecached {
namespace {

constexpr LayerIndex kLayer(3);

class GraceTest : public ::testing::Test {
 protected:
  void begin_epoch(int lane, std::uint64_t epoch, std::uint64_t layer) {
    lanes_[lane]->begun = epoch << 16 | layer;
  }
  void complete(int lane, std::uint64_t epoch) { lanes_[lane]->completed = epoch; }
  std::size_t start() {
    done_.clear();
    const GraceLane lanes[] = {{100, lanes_[0].get()}, {101, lanes_[1].get()}};
    const GraceTicket ticket{ModelId(1), kLayer, SlotIndex(2), ExpertIndex(9)};
    tracker_.begin(std::span(&ticket, 1), lanes, &done_);
    return done_.size();
  }
  std::size_t poll(bool known_unused = false) {
    done_.clear();
    tracker_.poll([&](auto, auto, auto, auto) { return known_unused; }, &done_);
    return done_.size();
  }

  std::unique_ptr<moecached_shm_lane> lanes_[2] = {std::make_unique<moecached_shm_lane>(),
                                                   std::make_unique<moecached_shm_lane>()};
  GraceTracker tracker_;
  std::vector<GraceTicket> done_;
};

TEST_F(GraceTest, QuietLanesHoldNothingUp) {
  begin_epoch(0, 4, kLayer.value);
  complete(0, 4);
  EXPECT_EQ(start(), 1u);
  EXPECT_TRUE(tracker_.empty());
}

TEST_F(GraceTest, LaneInTheLayerIsWaitedFor) {
  begin_epoch(0, 5, kLayer.value);
  complete(0, 4);
  EXPECT_EQ(start(), 0u);
  EXPECT_EQ(poll(), 0u);
  complete(0, 5);
  EXPECT_EQ(poll(), 1u);
  EXPECT_EQ(done_[0].slot, SlotIndex(2));
}

TEST_F(GraceTest, LaneInAnotherLayerIsNot) {
  begin_epoch(0, 5, kLayer.value + 1);
  complete(0, 4);
  EXPECT_EQ(start(), 1u);
}

TEST_F(GraceTest, LaneThatUsesAllLayersIsWaitedFor) {
  begin_epoch(0, 5, MOECACHED_LAYER_ALL);
  complete(0, 4);
  EXPECT_EQ(start(), 0u);
}

TEST_F(GraceTest, EpochBegunAfterTheFlipIsNotWaitedFor) {
  begin_epoch(0, 5, kLayer.value);
  complete(0, 4);
  ASSERT_EQ(start(), 0u);
  complete(0, 5);
  begin_epoch(0, 6, kLayer.value);
  EXPECT_EQ(poll(), 1u);
}

TEST_F(GraceTest, EveryLaneCounts) {
  for (int lane : {0, 1}) begin_epoch(lane, 5, kLayer.value);
  ASSERT_EQ(start(), 0u);
  complete(0, 5);
  EXPECT_EQ(poll(), 0u);
  complete(1, 5);
  EXPECT_EQ(poll(), 1u);
}

TEST_F(GraceTest, LaneKnownNotToUseTheExpertIsNotWaitedFor) {
  begin_epoch(0, 5, kLayer.value);
  ASSERT_EQ(start(), 0u);
  EXPECT_EQ(poll(true), 1u);
}

TEST_F(GraceTest, LaneThatIsGoneIsNotWaitedFor) {
  begin_epoch(0, 5, kLayer.value);
  ASSERT_EQ(start(), 0u);
  tracker_.lane_gone(100);
  EXPECT_EQ(poll(), 1u);
}

TEST_F(GraceTest, ForgottenTicketIsNeverReported) {
  begin_epoch(0, 5, kLayer.value);
  ASSERT_EQ(start(), 0u);
  tracker_.forget({ModelId(1), kLayer, SlotIndex(2), ExpertIndex(9)});
  complete(0, 5);
  EXPECT_EQ(poll(), 0u);
}

TEST_F(GraceTest, TicketsOfAModelThatIsGoneAreDropped) {
  begin_epoch(0, 5, kLayer.value);
  ASSERT_EQ(start(), 0u);
  tracker_.model_gone(ModelId(1));
  EXPECT_TRUE(tracker_.empty());
  EXPECT_EQ(poll(), 0u);
}

}  // namespace
}  // namespace moecached
