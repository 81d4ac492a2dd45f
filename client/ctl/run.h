// `moecachectl run`: a program with its experts in moecached. Uses the daemon that answers, or starts a
// private one for as long as the program runs. Thread: main.
#pragma once

#include <string>
#include <vector>

#include "client/ctl/control_client.h"
#include "client/ctl/run_plan.h"

namespace moecached::ctl {

struct RunOptions {
  std::vector<std::string> command;  // not empty
  DaemonSizes daemon;                // of the private one
  std::string plugin;                // empty: searched for
  bool always_private = false;
  bool no_flags = false;  // environment only
};

// The program's exit code, 128 + signal, or 125..127.
int run_program(ControlClient& client, const RunOptions& options);

}  // namespace moecached::ctl
