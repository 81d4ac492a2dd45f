// One function a subcommand: call, print, return the exit code. Thread: main.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/ctl/control_client.h"
#include "client/ctl/exit_codes.h"

namespace moecached::ctl {

struct Output {
  bool json = false;
};

// Says why on standard error, and with -o json as an object on standard output too.
int report(const Output& output, const Failure& failure);

int show_status(ControlClient& client, const Output& output);
int show_models(ControlClient& client, const Output& output, bool layers);
int show_sessions(ControlClient& client, const Output& output);
int show_stats(ControlClient& client, const Output& output);
struct WatchOptions {
  double interval_seconds = 1;
  std::uint32_t count = 0;  // snapshots; 0: until interrupted
};
int watch_stats(ControlClient& client, const Output& output, const WatchOptions& options);
int show_doctor(ControlClient& client, const Output& output);
int get_policy(ControlClient& client, const Output& output, std::uint32_t model);
int list_policies(ControlClient& client, const Output& output);
// where: "[TIER] SPEC" of the command line.
int set_policy(ControlClient& client, const Output& output, std::uint32_t model,
               const std::vector<std::string>& where);
// device: a GPU's UUID, or empty: in RAM slots.
int register_model(ControlClient& client, const Output& output, const std::vector<std::string>& paths,
                   const std::string& device);
int prewarm(ControlClient& client, const Output& output, std::uint32_t model, const std::string& path);
int drop_model(ControlClient& client, const Output& output, std::uint32_t model);
int show_version(ControlClient& client, const Output& output);

}  // namespace moecached::ctl
