// What moecachectl's exit code says. `run` returns its program's own code instead, and 125 to 127 for its own
// failures, as env(1) and timeout(1) do.
#pragma once

#include <string>

namespace moecached::ctl {

enum ExitCode : int {
  kExitOk = 0,
  kExitFinding = 1,   // doctor found an error
  kExitUsage = 2,     // bad command line
  kExitNoDaemon = 3,  // nobody answers on the socket
  kExitRefused = 4,   // the daemon, or the mode of its socket, says no
  kExitTimeout = 5,
  kExitInternal = 6,  // the daemon failed, or speaks another protocol
  kExitRunFailed = 125,
  kExitNotExecutable = 126,
  kExitNotFound = 127,
};

struct Failure {
  ExitCode code = kExitInternal;
  std::string text;  // a sentence for people
};

}  // namespace moecached::ctl
