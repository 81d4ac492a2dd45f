#include "daemon/app/logging.h"

#include <gmock/gmock.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

namespace moecached {
namespace {

using testing::MatchesRegex;

class Logging : public testing::Test {
 protected:
  ~Logging() override {
    start_logging(LogFormat::kText, "info", stderr);
    std::free(buffer_);
  }
  void start(LogFormat format, const char* level) {
    stream_ = ::open_memstream(&buffer_, &bytes_);
    start_logging(format, level, stream_);
  }
  std::string written() {
    start_logging(LogFormat::kText, "info", stderr);  // lets go of the stream
    std::fclose(stream_);
    return {buffer_, bytes_};
  }
  char* buffer_ = nullptr;
  std::size_t bytes_ = 0;
  std::FILE* stream_ = nullptr;
};

TEST_F(Logging, TextIsTimeLevelAndTheLine) {
  start(LogFormat::kText, "info");
  spdlog::info("session opened id={}", 3);
  EXPECT_THAT(written(), MatchesRegex("[0-9-]+T[0-9:.]+[+-][0-9:]+ info session opened id=3\n"));
}

TEST_F(Logging, LinesBelowTheLevelAreNotWritten) {
  start(LogFormat::kText, "warning");
  spdlog::info("quiet");
  set_log_level("debug");
  spdlog::debug("loud");
  const std::string text = written();
  EXPECT_EQ(text.find("quiet"), std::string::npos);
  EXPECT_NE(text.find("loud"), std::string::npos);
}

TEST_F(Logging, JsonHasOneObjectALineWithTheFields) {
  start(LogFormat::kJson, "info");
  spdlog::warn("model refused id={} name={}", 7, "a \"b\" c");
  const nlohmann::json line = nlohmann::json::parse(written());
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["message"], "model refused");
  EXPECT_EQ(line["id"], 7);
  EXPECT_EQ(line["name"], "a \"b\" c");
  EXPECT_THAT(line["time"].get<std::string>(), MatchesRegex("[0-9-]+T[0-9:]+[.][0-9]+Z"));
}

TEST_F(Logging, AClientsWordsReplaceNoFieldOfTheDaemonAndBreakNoJson) {
  start(LogFormat::kJson, "info");
  spdlog::info("session opened pid={} label={}", 7, "x pid=1 level=fine \xff\n");
  const std::string text = written();
  const nlohmann::json line = nlohmann::json::parse(text);
  EXPECT_EQ(line["pid"], 7);
  EXPECT_EQ(line["level"], "info");
  EXPECT_EQ(text.find('\n'), text.size() - 1);
}

TEST(LogFormat, AutoIsTheJournalOnlyWhenStandardErrorIsTheJournal) {
  struct stat status {};
  ASSERT_EQ(::fstat(STDERR_FILENO, &status), 0);
  ::unsetenv("JOURNAL_STREAM");
  EXPECT_EQ(choose_log_format("auto"), LogFormat::kText);
  ::setenv("JOURNAL_STREAM", "1:2", 1);
  EXPECT_EQ(choose_log_format("auto"), LogFormat::kText) << "somebody redirected standard error";
  ::setenv("JOURNAL_STREAM", (std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino)).c_str(),
           1);
  EXPECT_EQ(choose_log_format("auto"), LogFormat::kJournald);
  EXPECT_EQ(choose_log_format("json"), LogFormat::kJson);
  EXPECT_EQ(choose_log_format("text"), LogFormat::kText);
  ::unsetenv("JOURNAL_STREAM");
}

}  // namespace
}  // namespace moecached
