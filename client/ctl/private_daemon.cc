#include "client/ctl/private_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "client/ctl/run_plan.h"

namespace moecached::ctl {
namespace {

constexpr const char* kPrefix = "moecached-run-";
constexpr const char* kLock = "/run.lock";
constexpr std::chrono::seconds kStartPatience(60);  // a large pool takes a second per few GiB to create
constexpr std::chrono::seconds kStopPatience(30);

Failure failed(const std::string& what, int error) {
  return {kExitRunFailed, what + ": " + std::strerror(error)};
}

std::string base_directory() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool usable = runtime != nullptr && *runtime == '/' && ::access(runtime, W_OK | X_OK) == 0;
  return usable ? runtime : "/tmp";
}

// Opens the lock file of a run directory; -1 when there is none, or somebody holds it.
int try_lock(const std::string& directory, int flags) {
  const int fd = ::open((directory + kLock).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
  if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

void remove_directory(const std::string& directory) {
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
}

// What runs that were killed have left. A directory without its lock file is one that is just being made.
void sweep(const std::string& base) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(base, error), end; !error && it != end; it.increment(error)) {
    const std::string path = it->path();
    struct stat status {};
    if (!it->path().filename().string().starts_with(kPrefix)) continue;
    if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid())
      continue;
    const int fd = try_lock(path, 0);
    if (fd < 0) continue;
    remove_directory(path);
    ::close(fd);
  }
}

int bind_notify_socket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    ::close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

bool says_ready(int notify_fd) {
  char message[4096];
  const ssize_t got = ::recv(notify_fd, message, sizeof message, MSG_DONTWAIT);
  if (got <= 0) return false;
  std::string text("\n");
  text.append(message, static_cast<std::size_t>(got)).append("\n");
  return text.find("\nREADY=1\n") != std::string::npos;
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::variant<std::unique_ptr<PrivateDaemon>, Failure, PrivateDaemon::Interrupted> PrivateDaemon::start(
    const Options& options) {
  const std::string base = base_directory();
  sweep(base);
  std::string directory = base + "/" + kPrefix + "XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) return failed("cannot make a directory in " + base, errno);
  const int lock_fd = try_lock(directory, O_CREAT);
  if (lock_fd < 0)
    return failed("cannot lock " + directory, errno);  // a sweep of another run may have been quicker
  std::unique_ptr<PrivateDaemon> daemon(new PrivateDaemon(directory, lock_fd));

  const Descriptor notify{bind_notify_socket(directory + "/notify.sock")};
  if (notify.fd < 0) return failed("cannot make a socket in " + directory, errno);
  const Descriptor log{
      ::open((directory + "/moecached.log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)};
  if (log.fd < 0) return failed("cannot make a log file in " + directory, errno);

  // The machine's configuration is the system daemon's, not ours; /dev/null is an empty one.
  std::vector<std::string> arguments = {options.program, "--config=/dev/null",
                                        "--sockets-directory=" + directory, "--state-directory=auto",
                                        "--log-format=text"};
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());
  const int error = daemon->process_.start(
      {.path = options.program,
       .arguments = arguments,
       // What a systemd that started moecachectl meant for moecachectl is not for this daemon.
       .environment = with_environment(environ, {"NOTIFY_SOCKET=" + directory + "/notify.sock"},
                                       {"WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM",
                                        "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}),
       .own_session = true,
       .output_fd = log.fd});
  if (error != 0) return failed("cannot start " + options.program, error);

  const auto end = std::chrono::steady_clock::now() + kStartPatience;
  while (true) {
    pollfd entries[] = {{.fd = notify.fd, .events = POLLIN, .revents = 0},
                        {.fd = daemon->process_.pidfd(), .events = POLLIN, .revents = 0},
                        {.fd = options.signal_fd, .events = POLLIN, .revents = 0}};
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      return Failure{kExitRunFailed,
                     "the private daemon was not ready within a minute:\n" + daemon->log_tail()};
    }
    if (::poll(entries, 3, static_cast<int>(left.count())) < 0 && errno != EINTR)
      return failed("poll", errno);
    if (entries[0].revents != 0 && says_ready(notify.fd)) return daemon;
    if (entries[2].revents != 0) {
      signalfd_siginfo info{};
      if (::read(options.signal_fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        return Interrupted{static_cast<int>(info.ssi_signo)};
      }
    }
    if (const std::optional<int> code = daemon->process_.poll_exit()) {
      return Failure{kExitRunFailed, "the private daemon could not start (exit code " +
                                         std::to_string(*code) + "):\n" + daemon->log_tail()};
    }
  }
}

PrivateDaemon::~PrivateDaemon() {
  if (process_.pid() > 0) {
    process_.signal(SIGTERM);
    process_.stop(kStopPatience);
  }
  remove_directory(directory_);
  ::close(lock_fd_);
}

std::string PrivateDaemon::log_tail() const {
  constexpr std::size_t kLines = 10;
  std::ifstream file(directory_ + "/moecached.log");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  std::string tail;
  for (std::size_t i = lines.size() > kLines ? lines.size() - kLines : 0; i < lines.size(); ++i)
    tail.append("  ").append(lines[i]).append("\n");
  return tail;
}

}  // namespace moecached::ctl
