#include <gmock/gmock.h>

#include "tests/unit/config/config_testing.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Reload : public ConfigTest {
 protected:
  Config start(const std::string& toml, const std::vector<std::string>& flags = {}) {
    const Result<Config> config = load(toml, flags);
    EXPECT_TRUE(config) << (config ? "" : config.error().text);
    return config ? *config : Config{};
  }
  std::vector<std::string> refused_;
};

TEST_F(Reload, AppliesLogLevelAndPolicy) {
  const Config running = start("");
  write("[log]\nlevel = \"debug\"\n[policy]\ndefault = \"lru\"\n");
  const Result<Config> fresh = reload_config(running, request_, &refused_);
  ASSERT_TRUE(fresh) << fresh.error().text;
  EXPECT_EQ(fresh->log_level, "debug");
  EXPECT_EQ(fresh->policy, "lru");
  EXPECT_THAT(refused_, IsEmpty());
}

TEST_F(Reload, NamesWhatNeedsARestartAndLeavesItAlone) {
  const Config running = start("[ssd]\nqueue_depth = 8\n");
  write("[ssd]\nqueue_depth = 9\n[log]\nlevel = \"debug\"\n");
  const Result<Config> fresh = reload_config(running, request_, &refused_);
  ASSERT_TRUE(fresh) << fresh.error().text;
  EXPECT_EQ(fresh->ssd.queue_depth, 8u);
  EXPECT_EQ(fresh->log_level, "debug");
  EXPECT_THAT(refused_, ElementsAre("ssd.queue_depth stays 8 until a restart (the file says 9)"));
}

TEST_F(Reload, ASettingThatLeftTheFileGoesBackToItsDefault) {
  const Config running = start("[policy]\ndefault = \"lru\"\n");
  write("");
  const Result<Config> fresh = reload_config(running, request_, &refused_);
  ASSERT_TRUE(fresh) << fresh.error().text;
  EXPECT_EQ(fresh->policy, "slru");
}

TEST_F(Reload, FlagsStillWin) {
  const Config running = start("", {"--policy=lru", "--ssd-queue-depth=5"});
  write("[policy]\ndefault = \"slru\"\n[ssd]\nqueue_depth = 9\n");
  const Result<Config> fresh = reload_config(running, request_, &refused_);
  ASSERT_TRUE(fresh) << fresh.error().text;
  EXPECT_EQ(fresh->policy, "lru");
  EXPECT_EQ(fresh->ssd.queue_depth, 5u);
  EXPECT_THAT(refused_, IsEmpty());
}

TEST_F(Reload, ABadFileIsAnErrorAndNothingElse) {
  const Config running = start("");
  write("[log]\nlevel = \"debug\"\n[policy]\ndefault = \"best\"\n");
  const Result<Config> fresh = reload_config(running, request_, &refused_);
  ASSERT_FALSE(fresh);
  EXPECT_THAT(fresh.error().text, HasSubstr(":4: policy.default"));
}

TEST_F(Reload, WithoutAFileNothingChanges) {
  const Config running = start("[policy]\ndefault = \"lru\"\n");
  const Result<Config> fresh = reload_config(running, ConfigRequest{}, &refused_);
  ASSERT_TRUE(fresh);
  EXPECT_EQ(print_config(*fresh), print_config(running));
}

}  // namespace
}  // namespace moecached
