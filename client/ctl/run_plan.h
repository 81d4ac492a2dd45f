// What `moecachectl run` will do, decided without doing it: where plugin, daemon and program are, which flags
// and which environment the program gets. Thread: any.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moecached::ctl {

// Of /proc/self/exe; "" when it cannot be told.
[[nodiscard]] std::string executable_directory();

struct PluginSearch {
  std::string found;      // absolute path, or empty
  std::string looked_at;  // all candidates, for the sentence that says it is missing
};
// `given` (--plugin) alone if not empty, then $MOECACHED_PLUGIN, then around moecachectl: installed and build
// trees.
[[nodiscard]] PluginSearch find_plugin(const std::string& given, const std::string& directory);
// $MOECACHED_DAEMON, then around moecachectl, then $PATH. Empty: none.
[[nodiscard]] std::string find_daemon(const std::string& directory);

// What `run` can say of the private daemon; empty: its defaults.
struct DaemonSizes {
  std::string tiers = {}, pool_bytes = {}, slots = {}, policy = {};
  std::string gpu_slots = {}, gpu_bytes = {}, gpu_keep_free = {}, gpu_policy = {}, gpu_max_slowdown = {},
              gpu_mode = {};
};
[[nodiscard]] std::vector<std::string> daemon_arguments(const DaemonSizes& sizes);
// The options of `run` that were given, for the sentence that refuses them beside a running daemon: "--slots
// and
// --policy". Empty: none.
[[nodiscard]] std::string given_options(const DaemonSizes& sizes);

struct ProgramSearch {
  std::string path;      // empty: see error_number
  int error_number = 0;  // ENOENT or EACCES
};
// As execvp would: through $PATH when there is no slash.
[[nodiscard]] ProgramSearch find_program(const std::string& name);

// The flags that a llama.cpp program needs so that its experts are placed in our buffers; empty for other
// programs, for llama.cpp tools that load no model, and where the user has said it (-ot, or
// LLAMA_ARG_OVERRIDE_TENSOR).
[[nodiscard]] std::vector<std::string> extra_flags(const std::vector<std::string>& command,
                                                   std::string_view override_variable);
// `environment` ("NAME=value" each) with those of `set` replaced or added, and `unset` removed.
[[nodiscard]] std::vector<std::string> with_environment(const char* const* environment,
                                                        const std::vector<std::string>& set,
                                                        const std::vector<std::string>& unset = {});

}  // namespace moecached::ctl
