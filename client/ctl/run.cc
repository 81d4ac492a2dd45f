#include "client/ctl/run.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <variant>

#include "client/ctl/child.h"
#include "client/ctl/private_daemon.h"

namespace moecached::ctl {
namespace {

int fail(const Failure& failure) {
  std::fprintf(stderr, "moecachectl: %s\n", failure.text.c_str());
  return failure.code;
}

void say(const std::string& text) { std::fprintf(stderr, "moecachectl: %s\n", text.c_str()); }

// Blocked from the start, so that none is lost between two steps; the children start with none blocked.
int take_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) ::sigaddset(&set, number);
  if (::sigprocmask(SIG_BLOCK, &set, nullptr) != 0) return -1;
  return ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

struct Sockets {
  std::string control, handle;
};

// The daemon reports the path that it bound; in another container the same directory has another name.
std::string reachable_handle(const std::string& reported, const std::string& control) {
  struct stat status {};
  if (::stat(reported.c_str(), &status) == 0) return reported;
  return control.substr(0, control.rfind('/') + 1) + "handle.sock";
}

// The daemon to use; empty handle: none answers.
std::variant<Sockets, Failure> find_running(ControlClient& client, const RunOptions& options) {
  if (options.always_private) return Sockets{};
  control::v1::Status status;
  const auto failure = client.call(control::v1::GetStatusRequest(), &status);
  if (failure && failure->code == kExitNoDaemon) return Sockets{};
  if (failure && failure->code == kExitRefused) {
    say(failure->text + "; using a private daemon");
    return Sockets{};
  }
  if (failure) return Failure{kExitRunFailed, failure->text + " (--private starts one of your own)"};
  if (const std::string given = given_options(options.daemon); !given.empty()) {
    const bool one = given.find(' ') == std::string::npos;
    return Failure{kExitUsage, given + (one ? " is" : " are") +
                                   " for a private daemon, but one is running at " + client.socket() +
                                   ": leave " + (one ? "it" : "them") + " out, or add --private"};
  }
  return Sockets{.control = client.socket(),
                 .handle = reachable_handle(status.handle_socket(), client.socket())};
}

void forward(int signal_fd, const Child& child) {
  signalfd_siginfo info{};
  while (::read(signal_fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    // From the terminal (Ctrl-C, hang-up) the kernel has sent it to the whole foreground group, the child
    // included, and llama-server takes a second SIGINT for "stop at once".
    if (info.ssi_code != SI_KERNEL) child.signal(static_cast<int>(info.ssi_signo));
  }
}

int supervise(int signal_fd, Child& child, PrivateDaemon* daemon) {
  bool daemon_gone = daemon == nullptr;
  while (true) {
    if (const std::optional<int> code = child.poll_exit()) return *code;
    pollfd entries[] = {{.fd = signal_fd, .events = POLLIN, .revents = 0},
                        {.fd = child.pidfd(), .events = POLLIN, .revents = 0},
                        {.fd = daemon_gone ? -1 : daemon->process().pidfd(), .events = POLLIN, .revents = 0}};
    if (::poll(entries, 3, -1) < 0 && errno != EINTR) {
      say(std::string("poll: ") + std::strerror(errno));
      child.signal(SIGTERM);
      return kExitRunFailed;
    }
    if (entries[0].revents != 0) forward(signal_fd, child);
    if (daemon_gone) continue;
    if (const std::optional<int> code = daemon->process().poll_exit()) {
      daemon_gone = true;
      say("the private daemon ended (" + std::to_string(*code) +
          "); the program goes on and reads the model file itself\n" + daemon->log_tail());
    }
  }
}

}  // namespace

int run_program(ControlClient& client, const RunOptions& options) {
  const std::string& name = options.command.front();
  const ProgramSearch program = find_program(name);
  if (program.path.empty()) {
    return fail({program.error_number == EACCES ? kExitNotExecutable : kExitNotFound,
                 name + ": " + (program.error_number == EACCES ? "not executable" : "no such program")});
  }
  const std::string here = executable_directory();
  const PluginSearch plugin = find_plugin(options.plugin, here);
  if (plugin.found.empty()) {
    return fail({kExitRunFailed, "the llama.cpp plugin is not there: looked at " + plugin.looked_at +
                                     ". Give --plugin, or build it with MOECACHED_LLAMA_DIR set"});
  }
  const auto running = find_running(client, options);
  if (const auto* failure = std::get_if<Failure>(&running)) return fail(*failure);
  Sockets sockets = std::get<Sockets>(running);

  const int signal_fd = take_signals();
  if (signal_fd < 0)
    return fail({kExitRunFailed, std::string("cannot take over signals: ") + std::strerror(errno)});
  std::unique_ptr<PrivateDaemon> daemon;
  if (sockets.handle.empty()) {
    const std::string daemon_program = find_daemon(here);
    if (daemon_program.empty()) {
      return fail({kExitRunFailed, "no daemon answers, and no moecached program is near " + here +
                                       " or in PATH to start one"});
    }
    auto started = PrivateDaemon::start(
        {.program = daemon_program, .arguments = daemon_arguments(options.daemon), .signal_fd = signal_fd});
    if (const auto* failure = std::get_if<Failure>(&started)) return fail(*failure);
    if (const auto* interrupted = std::get_if<PrivateDaemon::Interrupted>(&started))
      return 128 + interrupted->signal;
    daemon = std::get<std::unique_ptr<PrivateDaemon>>(std::move(started));
    sockets = {.control = daemon->control_socket(), .handle = daemon->handle_socket()};
    say("started a private daemon; to look at it: moecachectl --socket " + sockets.control +
        " stats --watch");
  }

  std::vector<std::string> arguments = options.command;
  if (!options.no_flags) {
    const char* variable = std::getenv("LLAMA_ARG_OVERRIDE_TENSOR");
    const std::vector<std::string> extra = extra_flags(options.command, variable == nullptr ? "" : variable);
    arguments.insert(arguments.end(), extra.begin(), extra.end());
  }
  Child child;
  const int error =
      child.start({.path = program.path,
                   .arguments = arguments,
                   .environment = with_environment(
                       environ, {"GGML_BACKEND_PATH=" + plugin.found, "MOECACHED_SOCKET=" + sockets.handle,
                                 "MOECACHED_CONTROL_SOCKET=" + sockets.control})});
  if (error != 0) {
    return fail({error == ENOENT                       ? kExitNotFound
                 : error == EACCES || error == ENOEXEC ? kExitNotExecutable
                                                       : kExitRunFailed,
                 program.path + ": " + std::strerror(error)});
  }
  return supervise(signal_fd, child, daemon.get());
}

}  // namespace moecached::ctl
