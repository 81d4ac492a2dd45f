#include "daemon/config/config.h"

#include <gmock/gmock.h>

#include "daemon/platform/memory_info.h"
#include "tests/unit/config/config_testing.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Every setting away from its default, so that none can be dropped on the way unnoticed.
constexpr const char* kEverything = R"(# tiers = "RAM:lru:12.5%:1MiB:layer:prefetch=off,SSD:stream:128KiB"

[sockets]
directory = "/srv/run"
control = "/srv/run/a.sock"
handle = "/srv/run/b.sock"
mode = "0600"
group = "0"

[state]
directory = "/srv/state"

[pool]
bytes = 1048576
slots = "12.5%"
scope = "layer"
prefetch = "off"

[policy]
default = "lru"
directory = "/srv/policies"

[stream]
bytes = 131072

[ssd]
engine = "pread"
direct = false
queue_depth = 7
max_read = 65536

[gpu]
devices = "none"
slots = "25%"
bytes = 1073741824
keep_free = 0
scope = "global"
mode = "spill"
peers = false
policy = "slru"
max_slowdown = 7

[scrub]
period = "90s"
rate = 1048576

[limits]
sessions = 3
models = 2
user_sessions = 2
user_files = 99
user_bytes = 65536
hello_seconds = 3
route_streams = 5

[models]
roots = "/srv/models:/data"

[log]
level = "debug"
format = "json"

[control]
reflection = true
route = true
)";

TEST_F(ConfigTest, AnEmptyFileGivesTheDefaults) {
  const Result<Config> config = load("");
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->policy, "slru");
  EXPECT_EQ(config->socket_mode, 0660u);
  EXPECT_EQ(config->slots.kind, SlotsSpec::Kind::kAuto);
  EXPECT_EQ(config->slot_scope, SlotScope::kGlobal);
  EXPECT_EQ(config->ssd.queue_depth, 32u);
  EXPECT_EQ(config->control_socket, config->runtime_directory + "/control.sock");
  EXPECT_EQ(config->handle_socket, config->runtime_directory + "/handle.sock");
}

TEST_F(ConfigTest, ThePoolIsHalfOfTheMemoryWhenNobodySays) {
  const Result<Config> config = load("");
  ASSERT_TRUE(config) << config.error().text;
  const std::uint64_t half = machine_memory_bytes() / 2;
  EXPECT_LE(config->pool_bytes, half);
  EXPECT_GT(config->pool_bytes + 4096, half);
}

TEST_F(ConfigTest, EverySettingComesFromTheFile) {
  const Result<Config> config = load(kEverything);
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->runtime_directory, "/srv/run");
  EXPECT_EQ(config->control_socket, "/srv/run/a.sock");
  EXPECT_EQ(config->handle_socket, "/srv/run/b.sock");
  EXPECT_EQ(config->socket_mode, 0600u);
  EXPECT_EQ(config->socket_group, "0");
  EXPECT_EQ(config->pool_bytes, 1u << 20);
  EXPECT_EQ(config->slots.kind, SlotsSpec::Kind::kPercent);
  EXPECT_EQ(config->slots.value, 12.5);
  EXPECT_EQ(config->policy, "lru");
  EXPECT_EQ(config->stream_bytes, 131072u);
  EXPECT_EQ(config->ssd.engine, SsdEngine::kPread);
  EXPECT_FALSE(config->ssd.direct);
  EXPECT_EQ(config->ssd.queue_depth, 7u);
  EXPECT_EQ(config->ssd.max_read_bytes, 65536u);
  EXPECT_EQ(config->max_sessions, 3u);
  EXPECT_EQ(config->max_models, 2u);
  EXPECT_EQ(config->log_level, "debug");
  EXPECT_EQ(config->log_format, "json");
  EXPECT_TRUE(config->reflection);
  EXPECT_TRUE(config->route);
  EXPECT_EQ(config->max_route_streams, 5u);
}

TEST_F(ConfigTest, WhatIsPrintedParsesBackToTheSame) {
  const Result<Config> config = load(kEverything);
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(print_config(*config), kEverything);
  const Result<Config> again = load(print_config(*config));
  ASSERT_TRUE(again) << again.error().text;
  EXPECT_EQ(print_config(*again), print_config(*config));
}

TEST_F(ConfigTest, ThePrintedDefaultsParseBackToTheSame) {
  const Result<Config> config = load("");
  ASSERT_TRUE(config) << config.error().text;
  const Result<Config> again = load(print_config(*config));
  ASSERT_TRUE(again) << again.error().text;
  EXPECT_EQ(print_config(*again), print_config(*config));
}

TEST_F(ConfigTest, APeriodIsPrintedInItsLargestUnit) {
  const auto printed = [&](const std::string& period) {
    const Result<Config> config = load("[scrub]\nperiod = \"" + period + "\"\n");
    EXPECT_TRUE(config) << config.error().text;
    const std::string text = print_config(*config);
    const std::size_t begin = text.find("period = ");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_EQ(printed("120s"), "period = \"2m\"");
  EXPECT_EQ(printed("7200s"), "period = \"2h\"");
  EXPECT_EQ(printed("90s"), "period = \"90s\"");
  EXPECT_EQ(printed("none"), "period = \"none\"");
}

TEST_F(ConfigTest, QuotesAndBackslashesSurvivePrinting) {
  const Result<Config> config = load(R"([sockets]
directory = "/srv/a\"b\\c d"
)");
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->runtime_directory, "/srv/a\"b\\c d");
  const Result<Config> again = load(print_config(*config));
  ASSERT_TRUE(again) << again.error().text;
  EXPECT_EQ(again->runtime_directory, config->runtime_directory);
}

TEST_F(ConfigTest, FlagsWinOverTheFile) {
  const Result<Config> config = load(
      kEverything, {"--ssd-queue-depth=9", "--slots", "25%", "--ssd-direct", "--control-reflection=false"});
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->ssd.queue_depth, 9u);
  EXPECT_EQ(config->slots.value, 25);
  EXPECT_TRUE(config->ssd.direct);
  EXPECT_FALSE(config->reflection);
  EXPECT_EQ(config->max_sessions, 3u) << "the file still says the rest";
  EXPECT_THAT(request_.flag_keys,
              ElementsAre("pool.slots", "ssd.direct", "ssd.queue_depth", "control.reflection"));
}

TEST_F(ConfigTest, AFlagMendsAValueThatTheFileLeftOut) {
  const Result<Config> config = load("", {"--directory=/srv/other/"});
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->control_socket, "/srv/other/control.sock");
}

TEST_F(ConfigTest, TheLastOfARepeatedFlagCounts) {
  const Result<Config> config = load("", {"--limits-models=3", "--limits-models=4"});
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->max_models, 4u);
}

TEST_F(ConfigTest, ActionsAreTold) {
  ASSERT_TRUE(load("", {"--check-config"}));
  EXPECT_EQ(request_.action, ConfigRequest::Action::kCheck);
  ASSERT_TRUE(load("", {"--print-config"}));
  EXPECT_EQ(request_.action, ConfigRequest::Action::kPrint);
  ASSERT_TRUE(load_flags({"moecached", "--version"}));
  EXPECT_EQ(request_.action, ConfigRequest::Action::kVersion);
  ASSERT_TRUE(load_flags({"moecached", "--help"}));
  EXPECT_EQ(request_.action, ConfigRequest::Action::kHelp);
  EXPECT_THAT(request_.help, HasSubstr("--pool-bytes"));
  ASSERT_TRUE(load(""));
  EXPECT_EQ(request_.action, ConfigRequest::Action::kRun);
  EXPECT_EQ(request_.config_file, file());
}

TEST_F(ConfigTest, SystemdsRuntimeDirectoryIsTheDefaultOne) {
  ::setenv("RUNTIME_DIRECTORY", "/run/from-systemd", 1);
  const Result<Config> config = load("");
  ::unsetenv("RUNTIME_DIRECTORY");
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->handle_socket, "/run/from-systemd/handle.sock");
}

}  // namespace
}  // namespace moecached
