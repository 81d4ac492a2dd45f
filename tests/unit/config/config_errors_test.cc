#include <gmock/gmock.h>

#include "tests/unit/config/config_testing.h"

namespace moecached {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class ConfigErrors : public ConfigTest {};

TEST_F(ConfigErrors, AnUnknownKeyNamesFileLineAndTheNearestKey) {
  EXPECT_EQ(error("# first\n[ssd]\nqueue_dept = 3\n"),
            file() + ":3: ssd.queue_dept is not a known key; the nearest known key is ssd.queue_depth");
}

TEST_F(ConfigErrors, AKeyInTheWrongSectionIsSentToItsOwn) {
  EXPECT_THAT(error("[pool]\nqueue_depth = 3\n"), HasSubstr("the nearest known key is ssd.queue_depth"));
  EXPECT_THAT(error("queue_depth = 3\n"),
              HasSubstr(":1: queue_depth is not a known key; the nearest known key is ssd.queue_depth"));
}

TEST_F(ConfigErrors, AnUnknownSectionIsAnErrorEvenWhenEmpty) {
  EXPECT_THAT(error("[pools]\n"), HasSubstr(":1: pools is not a known key"));
  EXPECT_THAT(error("[pool.bytes]\nx = 1\n"), HasSubstr("pool.bytes must be"));
}

TEST_F(ConfigErrors, ASectionWrittenAsAKeyIsExplained) {
  EXPECT_THAT(error("pool = 3\n"), HasSubstr(":1: pool is a section: write [pool]"));
}

TEST_F(ConfigErrors, TheFirstErrorOfAFileIsReportedFirst) {
  EXPECT_THAT(error("[ssd]\nqueue_depth = 0\n[limits]\nmodels = 0\n"), HasSubstr(":2: ssd.queue_depth"));
}

TEST_F(ConfigErrors, BrokenTomlNamesItsLine) {
  EXPECT_THAT(error("[pool]\nbytes = \n"), StartsWith(file() + ":2: "));
  EXPECT_THAT(error("[pool]\nslots = 1\nslots = 2\n"), StartsWith(file() + ":3: "));
}

TEST_F(ConfigErrors, PunctuationWhereAKeyShouldBeIsAFaultAndNoAssertion) {
  EXPECT_THAT(error("[!]\n"), AllOf(HasSubstr(":1: "), HasSubstr("saw '!'")));
}

TEST_F(ConfigErrors, ALetterWhereAKeyShouldBeIsAFault) {
  EXPECT_THAT(error("\u00d3 = 1\n"), HasSubstr(":1: "));
}

TEST_F(ConfigErrors, WhatIsQuotedOfAFileIsFitForATerminal) {
  EXPECT_THAT(error("[ssd]\nengine = \"\\u001b[31m\"\n"), HasSubstr("ssd.engine = ?[31m: "));
  EXPECT_THAT(error("tiers = \"RAM:\tslru:1,SSD:x\"\n"), Not(HasSubstr("\t")));
  EXPECT_THAT(error("", {"--ssd-engine=\x1b[31m\xff"}), HasSubstr("?[31m?"));
}

TEST_F(ConfigErrors, APeriodWithoutAUnitOrBeyondAWeekIsRefused) {
  for (const char* text : {"10", "0m", "8d", "169h", "-1s", "m", "", "1.5h"}) {
    EXPECT_THAT(error("[scrub]\nperiod = \"" + std::string(text) + "\"\n"),
                AllOf(HasSubstr(":2: scrub.period"), HasSubstr("a time of at most 7 days like 90s")))
        << text;
  }
}

TEST_F(ConfigErrors, AMissingFileIsNamed) {
  const Result<Config> config = load_flags({"moecached", "--config", "/nowhere/x.toml"});
  ASSERT_FALSE(config);
  EXPECT_THAT(config.error().text, HasSubstr("/nowhere/x.toml"));
}

TEST_F(ConfigErrors, AFileThatIsNoConfigurationAtAllIsNotRead) {
  EXPECT_THAT(error(std::string((1 << 20) + 1, '#')), HasSubstr("larger than a configuration can be"));
}

TEST_F(ConfigErrors, ValuesOfTheWrongTypeSayWhichTypeIsRight) {
  EXPECT_THAT(error("[ssd]\nqueue_depth = \"3\"\n"),
              HasSubstr(":2: ssd.queue_depth must be a whole number without quotes"));
  EXPECT_THAT(error("[ssd]\ndirect = \"true\"\n"),
              HasSubstr(":2: ssd.direct must be true or false without quotes"));
  EXPECT_THAT(error("[sockets]\nmode = 660\n"), HasSubstr(":2: sockets.mode must be a string in quotes"));
  EXPECT_THAT(error("[pool]\nbytes = 1.5\n"),
              HasSubstr(":2: pool.bytes must be a string in quotes or a whole number"));
  EXPECT_THAT(error("[log]\nlevel = [\"info\"]\n"), HasSubstr(":2: log.level must be a string in quotes"));
}

struct OutOfRange {
  const char* toml;
  const char* flag;
  const char* limit;  // in both texts
};

class ConfigRange : public ConfigTest, public testing::WithParamInterface<OutOfRange> {};

TEST_P(ConfigRange, FileAndFlagAreRefusedWithTheLimitInTheText) {
  EXPECT_THAT(error(GetParam().toml), AllOf(StartsWith(file() + ":2: "), HasSubstr(GetParam().limit)));
  const std::string flag = GetParam().flag;
  EXPECT_THAT(error("", {flag}),
              AllOf(StartsWith(flag.substr(0, flag.find('='))), HasSubstr(GetParam().limit)));
}

INSTANTIATE_TEST_SUITE_P(
    EverySetting, ConfigRange,
    testing::Values(
        OutOfRange{"[sockets]\ndirectory = \"run\"", "--sockets-directory=run", "absolute path"},
        OutOfRange{"[sockets]\ncontrol = \"\"", "--sockets-control=x", "absolute path"},
        OutOfRange{"[sockets]\nhandle = \"h.sock\"", "--sockets-handle=h.sock", "absolute path"},
        OutOfRange{"[sockets]\nmode = \"0060\"", "--sockets-mode=0060", "between \"0600\" and \"0777\""},
        OutOfRange{"[sockets]\nmode = \"1777\"", "--sockets-mode=1777", "between \"0600\" and \"0777\""},
        OutOfRange{"[sockets]\nmode = \"rw\"", "--sockets-mode=rw", "octal mode"},
        OutOfRange{"[sockets]\ngroup = \"no such group\"", "--sockets-group=no-such-group", "is not a group"},
        OutOfRange{"[pool]\nbytes = 1", "--pool-bytes=1", "between 64KiB and "},
        OutOfRange{"[pool]\nbytes = \"8000TiB\"", "--pool-bytes=8000TiB", "between 64KiB and "},
        OutOfRange{"[pool]\nbytes = \"much\"", "--pool-bytes=much", "is not a size"},
        OutOfRange{"[pool]\nbytes = \"101%\"", "--pool-bytes=101%", "more than 100%"},
        OutOfRange{"[pool]\nbytes = -1", "--pool-bytes=-1", "is not a size"},
        OutOfRange{"[pool]\nslots = 0", "--pool-slots=0", "between 1 and 65536"},
        OutOfRange{"[pool]\nslots = \"0%\"", "--pool-slots=0%", "more than 0%"},
        OutOfRange{"[pool]\nscope = \"pool\"", "--pool-scope=pool", "must be one of layer, global"},
        OutOfRange{"[pool]\nslots = \"some\"", "--pool-slots=some", "must be auto"},
        OutOfRange{"[policy]\ndefault = \"best\"", "--policy-default=best", "slru"},
        OutOfRange{"[stream]\nbytes = 1", "--stream-bytes=1", "between 64KiB and 16GiB"},
        OutOfRange{"[ssd]\nengine = \"aio\"", "--ssd-engine=aio", "one of auto, io_uring, pread"},
        OutOfRange{"[ssd]\nqueue_depth = 1025", "--ssd-queue-depth=1025", "between 1 and 1024"},
        OutOfRange{"[ssd]\nqueue_depth = 0", "--ssd-queue-depth=0", "between 1 and 1024"},
        OutOfRange{"[ssd]\nmax_read = \"1KiB\"", "--ssd-max-read=1KiB", "between 4KiB and 1GiB"},
        OutOfRange{"[limits]\nsessions = 0", "--limits-sessions=99999", "between 1 and 4096"},
        OutOfRange{"[limits]\nmodels = 257", "--limits-models=257", "between 1 and 256"},
        OutOfRange{"[limits]\nuser_files = 7", "--limits-user-files=7", "between 8 and 1048576"},
        OutOfRange{"[models]\nroots = \"/a:b\"", "--models-roots=/a:b", "absolute paths separated by colons"},
        OutOfRange{"[log]\nlevel = \"loud\"", "--log-level=loud", "one of trace, debug"},
        OutOfRange{"[log]\nformat = \"xml\"", "--log-format=xml", "one of auto, text, json, journald"}));

TEST_F(ConfigErrors, AFlagThatIsNeitherTrueNorFalseIsRefused) {
  EXPECT_EQ(error("", {"--ssd-direct=maybe"}), "--ssd-direct maybe: must be true or false");
}

TEST_F(ConfigErrors, ASocketPathLongerThanTheKernelTakesIsRefused) {
  const std::string longest = "/" + std::string(106, 'x'), longer = longest + "x";
  EXPECT_TRUE(load("", {"--sockets-control=" + longest, "--sockets-handle=/h"}));
  EXPECT_THAT(error("", {"--sockets-control=" + longer}), HasSubstr("at most 107"));
  // The directory fits, what is derived from it does not.
  EXPECT_THAT(error("", {"--sockets-directory=/" + std::string(98, 'x')}),
              AllOf(HasSubstr("sockets.directory"), HasSubstr("at most 107")));
}

TEST_F(ConfigErrors, OneFileForBothSocketsIsRefused) {
  EXPECT_THAT(error("", {"--sockets-control=/a", "--sockets-handle=/a"}), HasSubstr("must be two sockets"));
}

TEST_F(ConfigErrors, AnUnknownFlagNamesTheNearest) {
  EXPECT_THAT(error("", {"--pool-byte=1"}), HasSubstr("the nearest one is --pool-bytes"));
  EXPECT_THAT(error("", {"--queue-depth=1"}), HasSubstr("the nearest one is --ssd-queue-depth"));
}

TEST_F(ConfigErrors, AWordThatIsNoFlagIsRefused) {
  EXPECT_THAT(error("", {"start"}), HasSubstr("\"start\" is not expected"));
}

TEST_F(ConfigErrors, AFlagWithoutItsValueIsRefused) {
  EXPECT_THAT(error("", {"--pool-bytes"}), HasSubstr("--pool-bytes"));
}

}  // namespace
}  // namespace moecached
