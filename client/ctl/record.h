// `moecachectl trace record`: writes what a model routes to into a moetrace-csv file, until the asked-for
// time or number of tokens is over, or a signal (SIGINT, SIGTERM) says stop; what was recorded until then is
// kept in any case. Thread: main; stop_recording() may be called from a signal handler.
#pragma once

#include <cstdint>
#include <string>

#include "client/ctl/commands.h"

namespace moecached::ctl {

struct RecordOptions {
  std::uint32_t model = 0;  // 0: the only one there is
  std::string path;
  double seconds = 0;          // 0: no limit
  std::uint64_t tokens = 0;    // 0: no limit
  bool single_tokens = false;  // leave out rows that stand for several tokens
};

int record_trace(ControlClient& client, const Output& output, const RecordOptions& options);
void stop_recording() noexcept;

}  // namespace moecached::ctl
