#include "daemon/residency/prefetch_switch.h"

#include <gtest/gtest.h>

#include <array>

namespace moecached {
namespace {

constexpr PrefetchPace kPace{
    .learn_tokens = 64, .window = 100, .pause_tokens_min = 128, .pause_tokens_max = 512};

class Switch {
 public:
  void events(std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) {
      if (pays.count_event()) pays.judge(sum);
    }
  }
  // One window, judged.
  void window(std::uint64_t used, std::uint64_t late, std::uint64_t wasted, std::uint64_t regretted) {
    sum.prefetched += used + late + wasted;
    sum.prefetch_used += used;
    sum.prefetch_late += late;
    sum.prefetch_wasted += wasted;
    sum.prefetch_regretted += regretted;
    events(64);
  }
  // Events until it leaves this state.
  std::uint64_t stays() {
    const PrefetchState state = pays.state();
    std::uint64_t n = 0;
    for (; pays.state() == state && n < 100'000; n += 64) events(64);
    return n;
  }

  PrefetchSwitch pays{2, kPace};
  LayerCounters sum;
};

TEST(PrefetchSwitch, LearnsFirstThenProbes) {
  Switch s;
  EXPECT_EQ(s.pays.state(), PrefetchState::kLearning);
  EXPECT_TRUE(s.pays.learns());
  EXPECT_FALSE(s.pays.may_start());
  EXPECT_EQ(s.stays(), 64u * 2) << "tokens of two layers";
  EXPECT_EQ(s.pays.state(), PrefetchState::kProbing);
  EXPECT_TRUE(s.pays.may_start());
}

TEST(PrefetchSwitch, GoesOnWhileItPays) {
  Switch s;
  s.stays();
  s.window(80, 0, 20, 0);
  EXPECT_EQ(s.pays.state(), PrefetchState::kOn);
  s.window(30, 0, 70, 0);
  EXPECT_EQ(s.pays.state(), PrefetchState::kOn) << "less than a probe must bring, but no loss";
  s.window(0, 10, 20, 0);
  EXPECT_EQ(s.pays.state(), PrefetchState::kOn) << "too few to judge";
}

TEST(PrefetchSwitch, PausesWhenWasteAndRegretsOutweighTheHits) {
  for (const auto& [used, late, wasted, regretted] :
       {std::array{10, 0, 90, 0}, std::array{50, 0, 50, 60}, std::array{0, 40, 60, 0}}) {
    Switch s;
    s.stays();
    s.window(100, 0, 0, 0);
    ASSERT_EQ(s.pays.state(), PrefetchState::kOn);
    s.window(used, late, wasted, regretted);
    EXPECT_EQ(s.pays.state(), PrefetchState::kPaused) << used << " used";
    EXPECT_FALSE(s.pays.learns());
    EXPECT_FALSE(s.pays.may_start());
  }
}

TEST(PrefetchSwitch, ThatOnlyBarelyGainsInAProbeDoesNotGoOn) {
  Switch s;
  s.stays();
  s.window(40, 0, 60, 0);
  EXPECT_EQ(s.pays.state(), PrefetchState::kPaused);
}

TEST(PrefetchSwitch, PausesLongerEachTimeUpToALimitAndShortlyAgainOnceItPaid) {
  Switch s;
  for (const std::uint64_t tokens : {128u, 256u, 512u, 512u}) {
    ASSERT_EQ(s.pays.state(), PrefetchState::kLearning);
    s.stays();
    s.window(0, 0, 100, 0);
    ASSERT_EQ(s.pays.state(), PrefetchState::kPaused);
    EXPECT_EQ(s.stays(), tokens * 2);
  }
  s.stays();
  s.window(100, 0, 0, 0);
  s.window(0, 0, 100, 0);
  ASSERT_EQ(s.pays.state(), PrefetchState::kPaused);
  EXPECT_EQ(s.stays(), 128u * 2);
}

TEST(PrefetchSwitch, DoesNotJudgeAProbeByWhatWasStartedBeforeThePause) {
  Switch s;
  s.stays();
  s.window(0, 0, 100, 0);
  ASSERT_EQ(s.pays.state(), PrefetchState::kPaused);
  s.sum.prefetch_wasted += 100;  // evicted one by one in the pause
  s.stays();
  s.stays();
  ASSERT_EQ(s.pays.state(), PrefetchState::kProbing);
  s.window(90, 0, 10, 0);
  EXPECT_EQ(s.pays.state(), PrefetchState::kOn);
}

}  // namespace
}  // namespace moecached
