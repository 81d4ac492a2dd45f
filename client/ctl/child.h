// A child process: started with everything prepared before the fork, followed by a descriptor, so that its
// pid is never mistaken for a later one. Thread: main.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace moecached::ctl {

struct ChildOptions {
  std::string path;                    // of the program, resolved
  std::vector<std::string> arguments;  // argv, with the name first
  std::vector<std::string> environment;
  bool own_session = false;  // away from the terminal: Ctrl-C does not reach it
  int output_fd =
      -1;  // becomes its standard output and error, and /dev/null its input; -1: inherits all three
};

class Child {
 public:
  Child() = default;
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;
  ~Child();  // does not end the process

  // 0, or the errno of what failed, exec included. The child gets no blocked signal, and SIGTERM when this
  // process dies.
  [[nodiscard]] int start(const ChildOptions& options);
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] int pidfd() const { return pidfd_; }  // readable once it has ended
  void signal(int number) const;                      // nothing once it has ended
  // The exit code, or 128 + signal. Nothing while it runs. Once ended, always the same answer.
  [[nodiscard]] std::optional<int> poll_exit();
  // Waits for the end; kills it when the time is over.
  int stop(std::chrono::milliseconds patience);

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  std::optional<int> exit_code_;
};

}  // namespace moecached::ctl
