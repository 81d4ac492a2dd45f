// Where the sockets lie when nobody says. Pure: the environment is an argument. Thread: any.
#pragma once

#include <string>

namespace moecached {

struct PathEnvironment {
  std::string runtime_directory;      // $RUNTIME_DIRECTORY, set by systemd for RuntimeDirectory=; may be a:b
  std::string xdg_runtime_directory;  // $XDG_RUNTIME_DIR
  bool root = false;
  std::string state_directory{};  // $STATE_DIRECTORY, set by systemd for StateDirectory=; may be a:b
  std::string xdg_state_home{};   // $XDG_STATE_HOME
  std::string home{};             // $HOME
};

[[nodiscard]] PathEnvironment path_environment();  // of this process
// systemd's directory, else /run/moecached for root, else the user's own runtime directory.
[[nodiscard]] std::string default_runtime_directory(const PathEnvironment& environment);
// systemd's directory, else /var/lib/moecached for root, else the user's own; "none" for a user without a
// home.
[[nodiscard]] std::string default_state_directory(const PathEnvironment& environment);

}  // namespace moecached
