// moecached: configuration, logging, the daemon, its control server; then signals until one says stop. The
// main thread starts everything, waits, and stops everything in the opposite order.
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>

#include "daemon/app/instance_lock.h"
#include "daemon/app/logging.h"
#include "daemon/app/service_manager.h"
#include "daemon/app/signals.h"
#include "daemon/config/config.h"
#include "daemon/control/control_server.h"
#include "daemon/ipc/daemon.h"

namespace moecached {
namespace {

enum ExitCode : int { kExitOk = 0, kExitUsage = 2, kExitAlreadyRunning = 3, kExitCannotStart = 4 };

constexpr std::chrono::milliseconds kControlStopDeadline(2000);

int fail(ExitCode code, const std::string& text) {
  spdlog::critical("cannot start: {}", text);
  return code;
}

// Makes the directory of the sockets where systemd has not. Not more than one level: a mistyped path should
// be an error.
Status ensure_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) return ok();
  return system_fault("create the runtime directory " + path, errno);
}

// Somebody who serves on one of our sockets although the lock was free: another program, or an older daemon.
Result<std::optional<std::string>> other_server(const Config& config) {
  for (const std::string& path : {config.control_socket, config.handle_socket}) {
    Result<std::optional<std::string>> owner = socket_owner(path);
    if (!owner) return owner;
    if (owner->has_value()) return std::optional<std::string>(**owner + " listens on " + path);
  }
  return std::optional<std::string>{};
}

std::string status_line(Daemon& daemon) {
  const StatusReport report = daemon.status();
  return fmt::format("{} sessions, {} models, {} MiB of {} MiB in use", report.sessions, report.models,
                     report.pool_bytes_backed >> 20, report.pool_bytes_limit >> 20);
}

void reload(const ConfigRequest& request, Daemon& daemon, Config* running) {
  std::vector<std::string> refused;
  Result<Config> fresh = reload_config(*running, request, &refused);
  if (!fresh) {
    spdlog::error("configuration not reloaded, the running one stays: {}", fresh.error().text);
    return;
  }
  for (const std::string& text : refused) spdlog::warn("not changed by a reload: {}", text);
  set_log_level(fresh->log_level);
  // Only a changed policy: it replaces what an operator has set for single models meanwhile.
  if (fresh->policy != running->policy) {
    const Status applied = daemon.reload(*fresh);
    if (!applied) {
      spdlog::error("policy not changed: {}", applied.error().text);
      fresh->policy = running->policy;
    }
  }
  *running = *std::move(fresh);
  spdlog::info("configuration reloaded file={} level={} policy={}", request.config_file, running->log_level,
               running->policy);
}

int serve(Config config, const ConfigRequest& request) {
  const ServiceManager service_manager;
  Result<Signals> signals = Signals::take_over();
  if (!signals) return fail(kExitCannotStart, signals.error().text);
  if (const Status made = ensure_directory(config.runtime_directory); !made)
    return fail(kExitCannotStart, made.error().text);

  std::string holder;
  const Result<std::optional<InstanceLock>> lock =
      InstanceLock::acquire(config.control_socket + ".lock", &holder);
  if (!lock) return fail(kExitCannotStart, lock.error().text);
  if (!lock->has_value()) {
    return fail(kExitAlreadyRunning,
                "moecached is already running as " + holder + " on " + config.control_socket);
  }
  const Result<std::optional<std::string>> other = other_server(config);
  if (!other) return fail(kExitCannotStart, other.error().text);
  if (other->has_value()) return fail(kExitAlreadyRunning, **other);

  Result<std::unique_ptr<Daemon>> daemon = Daemon::start(config);
  if (!daemon) return fail(kExitCannotStart, daemon.error().text);
  Result<std::unique_ptr<ControlServer>> control =
      ControlServer::start({.socket = config.control_socket,
                            .access = {.mode = config.socket_mode, .group = config.socket_group},
                            .reflection = config.reflection,
                            .max_route_streams = config.route ? config.max_route_streams : 0},
                           **daemon);
  if (!control) return fail(kExitCannotStart, control.error().text);

  spdlog::info("ready version={} control={} handle={} pool_bytes={} policy={}", MOECACHED_VERSION,
               config.control_socket, config.handle_socket, config.pool_bytes, config.policy);
  service_manager.ready(status_line(**daemon));

  for (bool stopping = false; !stopping;) {
    const Result<SignalEvent> event = signals->wait(service_manager.watchdog_interval());
    if (!event) {
      spdlog::critical("stopping: {}", event.error().text);
      break;
    }
    switch (*event) {
      case SignalEvent::kTimeout:
        // Asks the core loop: when it hangs, so does this thread, and systemd restarts us.
        service_manager.status(status_line(**daemon));
        break;
      case SignalEvent::kReload:
        service_manager.reloading();
        reload(request, **daemon, &config);
        service_manager.ready(status_line(**daemon));
        break;
      case SignalEvent::kStop:
        stopping = true;
        break;
    }
    service_manager.alive();
  }
  service_manager.stopping();
  spdlog::info("stopping");
  (*control)->stop(kControlStopDeadline);  // first: its handlers call the daemon
  (*daemon)->stop();
  spdlog::info("stopped");
  return kExitOk;
}

int run(int argc, char** argv) {
  ConfigRequest request;
  Result<Config> config = load_config(argc, argv, &request);
  if (!config) {
    std::fprintf(stderr, "moecached: %s\n", config.error().text.c_str());
    return kExitUsage;
  }
  switch (request.action) {
    case ConfigRequest::Action::kVersion:
      std::puts("moecached " MOECACHED_VERSION);
      return kExitOk;
    case ConfigRequest::Action::kHelp:
      std::fputs(request.help.c_str(), stdout);
      return kExitOk;
    case ConfigRequest::Action::kPrint:
      std::fputs(print_config(*config).c_str(), stdout);
      return kExitOk;
    case ConfigRequest::Action::kCheck:
      std::printf("%s: ok\n",
                  request.config_file.empty() ? "no configuration file" : request.config_file.c_str());
      return kExitOk;
    case ConfigRequest::Action::kRun:
      break;
  }
  start_logging(choose_log_format(config->log_format), config->log_level, stderr);
  return serve(*std::move(config), request);
}

}  // namespace
}  // namespace moecached

int main(int argc, char** argv) { return moecached::run(argc, argv); }
