#include "client/ctl/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace moecached::ctl {
namespace {

// glibc 2.36 declares its wrapper without extern "C".
int pidfd_open(pid_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

struct Prepared {
  const char* path;
  char* const* argv;
  char* const* envp;
  pid_t parent;
  int error_fd;  // close-on-exec: the parent reads end-of-file when exec worked
  int null_fd;
  int output_fd;
  bool own_session;
};

// Between fork and exec of a process with threads only async-signal-safe calls are allowed: gRPC may hold any
// lock.
[[noreturn]] void become(const Prepared& prepared) {
  const auto give_up = [&](int error) {
    // A failed write leaves the parent with end-of-file and our exit code: nothing more can be done here.
    [[maybe_unused]] const ssize_t written = ::write(prepared.error_fd, &error, sizeof error);
    ::_exit(127);
  };
  if (::prctl(PR_SET_PDEATHSIG, SIGTERM) != 0) give_up(errno);
  // It may have died before the call above; then nobody will tell us.
  if (::getppid() != prepared.parent) ::_exit(127);
  if (prepared.own_session) ::setsid();
  if (prepared.output_fd >= 0) {
    if (::dup2(prepared.null_fd, STDIN_FILENO) < 0 || ::dup2(prepared.output_fd, STDOUT_FILENO) < 0 ||
        ::dup2(prepared.output_fd, STDERR_FILENO) < 0) {
      give_up(errno);
    }
  }
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execve(prepared.path, prepared.argv, prepared.envp);
  give_up(errno);
  ::_exit(127);
}

}  // namespace

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::exchange(other.pidfd_, -1)),
      exit_code_(std::exchange(other.exit_code_, std::nullopt)) {}

Child::~Child() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

int Child::start(const ChildOptions& options) {
  const std::vector<char*> argv = pointers(options.arguments), envp = pointers(options.environment);
  int errors[2];
  if (::pipe2(errors, O_CLOEXEC) != 0) return errno;
  const int null_fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const Prepared prepared{.path = options.path.c_str(),
                          .argv = argv.data(),
                          .envp = envp.data(),
                          .parent = ::getpid(),
                          .error_fd = errors[1],
                          .null_fd = null_fd,
                          .output_fd = options.output_fd,
                          .own_session = options.own_session};
  const pid_t pid = null_fd < 0 ? -1 : ::fork();
  if (pid == 0) become(prepared);
  int error = pid < 0 ? errno : 0;
  ::close(errors[1]);
  if (null_fd >= 0) ::close(null_fd);
  if (pid > 0) {
    int reported = 0;
    ssize_t got = 0;
    do {
      got = ::read(errors[0], &reported, sizeof reported);
    } while (got < 0 && errno == EINTR);
    if (got == static_cast<ssize_t>(sizeof reported)) error = reported;
    pid_ = pid;
    pidfd_ = error == 0 ? pidfd_open(pid) : -1;
    if (error == 0 && pidfd_ < 0) {
      error = errno;
      ::kill(pid, SIGKILL);
    }
    if (error != 0) {
      ::waitpid(pid, nullptr, 0);
      pid_ = -1;
    }
  }
  ::close(errors[0]);
  return error;
}

void Child::signal(int number) const {
  if (pidfd_ >= 0) (void)::syscall(SYS_pidfd_send_signal, pidfd_, number, nullptr, 0);
}

std::optional<int> Child::poll_exit() {
  if (exit_code_ || pid_ < 0) return exit_code_;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  exit_code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return exit_code_;
}

int Child::stop(std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!poll_exit()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) signal(SIGKILL);
    pollfd entry{.fd = pidfd_, .events = POLLIN, .revents = 0};
    (void)::poll(&entry, 1, left.count() > 0 ? static_cast<int>(left.count()) : -1);
  }
  return *exit_code_;
}

}  // namespace moecached::ctl
