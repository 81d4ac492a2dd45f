#include "daemon/config/default_paths.h"

#include <unistd.h>

#include <cstdlib>

namespace moecached {

PathEnvironment path_environment() {
  const auto text = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  return {.runtime_directory = text("RUNTIME_DIRECTORY"),
          .xdg_runtime_directory = text("XDG_RUNTIME_DIR"),
          .root = ::geteuid() == 0,
          .state_directory = text("STATE_DIRECTORY"),
          .xdg_state_home = text("XDG_STATE_HOME"),
          .home = text("HOME")};
}

std::string default_runtime_directory(const PathEnvironment& environment) {
  if (!environment.runtime_directory.empty()) {
    return environment.runtime_directory.substr(0, environment.runtime_directory.find(':'));
  }
  if (!environment.root && !environment.xdg_runtime_directory.empty()) {
    return environment.xdg_runtime_directory + "/moecached";
  }
  return "/run/moecached";
}

std::string default_state_directory(const PathEnvironment& environment) {
  if (!environment.state_directory.empty()) {
    return environment.state_directory.substr(0, environment.state_directory.find(':'));
  }
  if (environment.root) return "/var/lib/moecached";
  if (!environment.xdg_state_home.empty()) return environment.xdg_state_home + "/moecached";
  if (!environment.home.empty()) return environment.home + "/.local/state/moecached";
  return "none";
}

}  // namespace moecached
