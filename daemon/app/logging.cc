#include "daemon/app/logging.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <syslog.h>
#include <systemd/sd-journal.h>
#include <unistd.h>

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "daemon/app/log_fields.h"

namespace moecached {
namespace {

int syslog_priority(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::critical:
      return LOG_CRIT;
    case spdlog::level::err:
      return LOG_ERR;
    case spdlog::level::warn:
      return LOG_WARNING;
    case spdlog::level::info:
      return LOG_INFO;
    default:
      return LOG_DEBUG;
  }
}

std::string timestamp(spdlog::log_clock::time_point time) {
  const auto since_epoch = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch - seconds);
  const std::time_t whole = seconds.count();
  std::tm utc{};
  ::gmtime_r(&whole, &utc);
  char text[40];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  char fraction[8];
  std::snprintf(fraction, sizeof fraction, ".%03dZ", static_cast<int>(millis.count()));
  return std::string(text, length) + fraction;
}

class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const LogFields split = split_fields(std::string_view(message.payload.data(), message.payload.size()));
    const spdlog::string_view_t level = spdlog::level::to_string_view(message.level);
    nlohmann::ordered_json line = {{"time", timestamp(message.time)},
                                   {"level", std::string(level.data(), level.size())},
                                   {"message", split.sentence}};
    for (const auto& [key, value] : split.fields) {
      // A value may hold a client's words; what it repeats must not replace what the daemon said before it.
      if (line.contains(key)) continue;
      std::int64_t number = 0;
      const char* const end = value.data() + value.size();
      const auto [after, error] = std::from_chars(value.data(), end, number);
      if (error == std::errc() && after == end) {
        line[std::string(key)] = number;
      } else {
        line[std::string(key)] = value;
      }
    }
    const std::string text =
        line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    out.append(text.data(), text.data() + text.size());
  }
  [[nodiscard]] std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

class JournalSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const std::string_view payload(message.payload.data(), message.payload.size());
    std::vector<std::string> entries = {"MESSAGE=" + std::string(payload),
                                        "PRIORITY=" + std::to_string(syslog_priority(message.level)),
                                        "SYSLOG_IDENTIFIER=moecached"};
    for (const auto& [key, value] : split_fields(payload).fields) {
      std::string entry = "MOECACHED_";
      for (const char c : key) entry += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      entries.push_back(entry.append("=").append(value));
    }
    std::vector<iovec> parts;
    for (std::string& entry : entries) parts.push_back({entry.data(), entry.size()});
    // Nothing can be done when the journal is gone; the daemon goes on.
    (void)::sd_journal_sendv(parts.data(), static_cast<int>(parts.size()));
  }
  void flush_() override {}
};

class StreamSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StreamSink(std::FILE* stream) : stream_(stream) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::fwrite(line.data(), 1, line.size(), stream_);
    std::fflush(stream_);
  }
  void flush_() override { std::fflush(stream_); }

 private:
  std::FILE* const stream_;
};

// systemd sets JOURNAL_STREAM to "device:inode" of the stream it connected. The variable is inherited, so
// only a match with our own standard error says that nobody redirected it since.
bool stderr_is_journal() {
  const char* stream = std::getenv("JOURNAL_STREAM");
  struct stat status {};
  if (stream == nullptr || ::fstat(STDERR_FILENO, &status) != 0) return false;
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino) == stream;
}

}  // namespace

LogFormat choose_log_format(const std::string& configured) {
  if (configured == "json") return LogFormat::kJson;
  if (configured == "journald") return LogFormat::kJournald;
  if (configured == "auto" && stderr_is_journal()) return LogFormat::kJournald;
  return LogFormat::kText;
}

void start_logging(LogFormat format, const std::string& level, std::FILE* stream) {
  std::shared_ptr<spdlog::logger> logger;
  if (format == LogFormat::kJournald) {
    logger = std::make_shared<spdlog::logger>("moecached", std::make_shared<JournalSink>());
  } else {
    logger = std::make_shared<spdlog::logger>("moecached", std::make_shared<StreamSink>(stream));
    if (format == LogFormat::kJson) {
      logger->set_formatter(std::make_unique<JsonFormatter>());
    } else {
      logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
    }
  }
  spdlog::set_default_logger(std::move(logger));
  set_log_level(level);
}

void set_log_level(const std::string& level) { spdlog::set_level(spdlog::level::from_str(level)); }

}  // namespace moecached
