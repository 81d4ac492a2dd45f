// Sets up the process-wide spdlog logger. Everybody logs with spdlog::info("sentence key={}", value); see
// log_fields.h.
//   text      2025-01-31T10:00:00.123+0000 info session opened id=3
//   json      {"time":"...","level":"info","message":"session opened","id":3}
//   journald  MESSAGE=session opened id=3, PRIORITY=6, MOECACHED_ID=3
// Thread: main, before any other exists; set_log_level from main at any time.
#pragma once

#include <cstdio>
#include <string>

#include "daemon/base/result.h"

namespace moecached {

enum class LogFormat : unsigned char { kText, kJson, kJournald };

// "auto" is journald when systemd connected standard error to the journal, else text.
[[nodiscard]] LogFormat choose_log_format(const std::string& configured);
// REQUIRES: level is one that config/ accepts. Text and JSON go to `stream`.
void start_logging(LogFormat format, const std::string& level, std::FILE* stream);
void set_log_level(const std::string& level);

}  // namespace moecached
