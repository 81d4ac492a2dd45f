#include "shim/ggml/abi_guard.h"

#include <gtest/gtest.h>

namespace moecached::shim {
namespace {

TEST(AbiGuard, KnowsTheReleaseByItsCommit) {
  EXPECT_EQ(judge_build("0.25.1", "0ad4a86", ""), BuildVerdict::kKnown);
}

TEST(AbiGuard, TakesTheReleaseWithoutItsHistory) {
  EXPECT_EQ(judge_build("0.25.1", "unknown", ""), BuildVerdict::kKnown);
  EXPECT_EQ(judge_build("0.25.1", "1234567-dirty", ""), BuildVerdict::kKnown);
}

TEST(AbiGuard, RefusesOtherCommitsOfTheSameVersion) {
  EXPECT_EQ(judge_build("0.25.1", "fffffff", ""), BuildVerdict::kUnknown);
}

TEST(AbiGuard, RefusesOtherVersionsWhateverTheirCommit) {
  for (const char* commit : {"0ad4a86", "unknown", "1234567-dirty"}) {
    EXPECT_EQ(judge_build("0.25.2", commit, ""), BuildVerdict::kUnknown) << commit;
  }
}

TEST(AbiGuard, LetsTheUserAllowOneVersionByName) {
  EXPECT_EQ(judge_build("0.26.0", "fffffff", "0.26.0"), BuildVerdict::kAllowedByUser);
  EXPECT_EQ(judge_build("0.26.1", "fffffff", "0.26.0"), BuildVerdict::kUnknown);
  EXPECT_EQ(judge_build("0.25.1", "0ad4a86", "0.26.0"), BuildVerdict::kKnown);
}

TEST(AbiGuard, NamesTheBuildsItKnows) {
  EXPECT_NE(known_builds().find("0.25.1"), std::string::npos);
  EXPECT_NE(known_builds().find("0ad4a86"), std::string::npos);
}

}  // namespace
}  // namespace moecached::shim
