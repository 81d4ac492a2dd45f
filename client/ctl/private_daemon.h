// A moecached for one `moecachectl run`: in a directory of its own, logging to a file there, gone afterwards.
// Thread: main.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "client/ctl/child.h"
#include "client/ctl/exit_codes.h"

namespace moecached::ctl {

class PrivateDaemon {
 public:
  struct Options {
    std::string program;                 // path of moecached
    std::vector<std::string> arguments;  // in addition to those that place it: --pool-bytes=4GiB
    int signal_fd = -1;                  // a signalfd: a signal that comes while it starts ends the attempt
  };
  struct Interrupted {
    int signal = 0;
  };
  // Returns when the daemon is ready: it says so as it would to systemd, so there is nothing to poll for.
  // Directories that killed runs left behind are removed on the way.
  [[nodiscard]] static std::variant<std::unique_ptr<PrivateDaemon>, Failure, Interrupted> start(
      const Options& options);
  ~PrivateDaemon();  // stops it and removes the directory
  PrivateDaemon(const PrivateDaemon&) = delete;
  PrivateDaemon& operator=(const PrivateDaemon&) = delete;

  [[nodiscard]] std::string control_socket() const { return directory_ + "/control.sock"; }
  [[nodiscard]] std::string handle_socket() const { return directory_ + "/handle.sock"; }
  [[nodiscard]] Child& process() { return process_; }
  [[nodiscard]] std::string log_tail() const;  // the last lines, for a failure's text

 private:
  PrivateDaemon(std::string directory, int lock_fd) : directory_(std::move(directory)), lock_fd_(lock_fd) {}
  const std::string directory_;
  const int lock_fd_;  // a lock on the directory says that its owner lives
  Child process_;
};

}  // namespace moecached::ctl
