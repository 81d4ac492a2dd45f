// Streaming through the two halves of a lane's buffer.
#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

using Ids = std::vector<std::int32_t>;

class LaneStream : public ClientTest {
 protected:
  void SetUp() override { open_all(); }

  // Waits for a half and checks every expert in it.
  [[nodiscard]] bool half_holds(std::uint32_t half, std::uint32_t layer, std::uint32_t part,
                                const Ids& experts) {
    const void* data = nullptr;
    if (moecached_stream_wait(lane_, half, &data) != MOECACHED_OK) return false;
    const std::byte* at = static_cast<const std::byte*>(data);
    for (const std::int32_t expert : experts) {
      if (!model_file_.part_is(layer, part, static_cast<std::uint32_t>(expert), at)) return false;
      at += model_file_.shape().part_bytes[part];
    }
    return true;
  }
};

TEST_F(LaneStream, CapacityIsWhatFitsIntoAHalf) {
  EXPECT_EQ(moecached_stream_capacity(lane_, 0, 2), 2u);   // 12288 / 4132
  EXPECT_EQ(moecached_stream_capacity(lane_, 0, 0), 12u);  // 12288 / 1000
  EXPECT_EQ(moecached_stream_capacity(lane_, 0, 1), 16u);  // 23 would fit; there are 16 experts
  EXPECT_EQ(moecached_stream_capacity(lane_, 0, 3), 0u);
  EXPECT_EQ(moecached_stream_capacity(lane_, 9, 0), 0u);
}

TEST_F(LaneStream, HalvesAreIndependent) {
  const Ids first{15, 0};
  const Ids second{7, 8};
  ASSERT_EQ(moecached_stream_begin(lane_, 2, 2, first.data(), 2, 0), MOECACHED_OK) << moecached_last_error();
  ASSERT_EQ(moecached_stream_begin(lane_, 2, 2, second.data(), 2, 1), MOECACHED_OK);
  EXPECT_TRUE(half_holds(0, 2, 2, first));
  EXPECT_TRUE(half_holds(1, 2, 2, second));
  const Ids third{4};
  ASSERT_EQ(moecached_stream_begin(lane_, 2, 2, third.data(), 1, 0), MOECACHED_OK);
  EXPECT_TRUE(half_holds(1, 2, 2, second)) << "a wait may be repeated, and the other half is untouched";
  EXPECT_TRUE(half_holds(0, 2, 2, third));
  EXPECT_EQ(counters().streamed_experts, 5u);
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(LaneStream, ManyRoundsThroughBothHalves) {
  for (int round = 0; round < 50; ++round) {
    const Ids experts{round % 16, (round + 3) % 16};
    const std::uint32_t half = static_cast<std::uint32_t>(round % 2);
    ASSERT_EQ(moecached_stream_begin(lane_, 1, 2, experts.data(), 2, half), MOECACHED_OK);
    ASSERT_TRUE(half_holds(half, 1, 2, experts)) << "round " << round;
  }
  EXPECT_EQ(counters().fallback_reads, 0u);
}

TEST_F(LaneStream, PassesTheWholeRequest) {
  Ids experts(12);
  for (int i = 0; i < 12; ++i) experts[i] = 12 - i;
  ASSERT_EQ(moecached_stream_begin(lane_, 1, 0, experts.data(), 12, 1), MOECACHED_OK);
  EXPECT_TRUE(half_holds(1, 1, 0, experts));
  const auto seen = daemon_->wait_for(MOECACHED_RECORD_STREAM, 1)[0];
  EXPECT_EQ(seen.layer, 1);
  EXPECT_EQ(seen.part, 0);
  EXPECT_EQ(seen.half, 1);
  EXPECT_EQ(seen.ids.size(), 12u);
  EXPECT_EQ(seen.ids.front(), 12);
  EXPECT_EQ(counters().lookups, 12u) << "part 0 stands for the lookups of a layer";
}

TEST_F(LaneStream, EachLaneHasItsOwnBuffer) {
  moecached_lane* other = nullptr;
  ASSERT_EQ(moecached_lane_open(model_, &other), MOECACHED_OK);
  const Ids mine{1, 2};
  const Ids theirs{3, 4};
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 2, mine.data(), 2, 0), MOECACHED_OK);
  ASSERT_EQ(moecached_stream_begin(other, 0, 2, theirs.data(), 2, 0), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(other, 0, &data), MOECACHED_OK);
  EXPECT_TRUE(model_file_.part_is(0, 2, 3, data));
  EXPECT_TRUE(half_holds(0, 0, 2, mine));
  moecached_lane_close(other);
}

TEST_F(LaneStream, FailedReadIsRepeatedFromTheFile) {
  for (const OnRequest answer : {OnRequest::kIoError, OnRequest::kRefuse}) {
    daemon_->on_stream(answer);
    const Ids experts{6, 1};
    ASSERT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 2, 0), MOECACHED_OK);
    EXPECT_TRUE(half_holds(0, 0, 2, experts));
  }
  EXPECT_EQ(counters().streamed_experts, 0u);
  EXPECT_EQ(counters().fallback_reads, 4u);
  EXPECT_EQ(counters().fallback_bytes, 4u * 4132);
}

TEST_F(LaneStream, ChangedModelIsAnError) {
  daemon_->on_stream(OnRequest::kModelChanged);
  const Ids experts{6};
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 1, 0), MOECACHED_OK);
  const void* data = nullptr;
  EXPECT_EQ(moecached_stream_wait(lane_, 0, &data), MOECACHED_E_MODEL_CHANGED);
}

TEST_F(LaneStream, DaemonThatHangsUpIsReplacedByTheFile) {
  daemon_->on_stream(OnRequest::kHangUp);
  const Ids experts{6, 2};
  ASSERT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 2, 0), MOECACHED_OK);
  EXPECT_TRUE(half_holds(0, 0, 2, experts));
  ASSERT_EQ(moecached_stream_begin(lane_, 1, 2, experts.data(), 2, 0), MOECACHED_OK);
  EXPECT_TRUE(half_holds(0, 1, 2, experts));
  EXPECT_EQ(counters().fallback_reads, 4u);
  EXPECT_EQ(moecached_session_connected(session_), 0);
}

TEST_F(LaneStream, RefusesWhatDoesNotFitOrExist) {
  const Ids experts{1, 2, 16};
  const void* data = nullptr;
  EXPECT_EQ(moecached_stream_wait(lane_, 0, &data), MOECACHED_E_ARGUMENT) << "nothing was begun";
  EXPECT_EQ(moecached_stream_wait(lane_, 2, &data), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 3, 0), MOECACHED_E_ARGUMENT) << "2 fit";
  EXPECT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 0, 0), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_stream_begin(lane_, 0, 2, experts.data(), 1, 2), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_stream_begin(lane_, 0, 0, experts.data(), 3, 0), MOECACHED_E_ARGUMENT)
      << "no expert 16";
  EXPECT_EQ(moecached_stream_begin(lane_, 0, 3, experts.data(), 1, 0), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(daemon_->count(MOECACHED_RECORD_STREAM), 0u);
}

}  // namespace
}  // namespace moecached::client::test
