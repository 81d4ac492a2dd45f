#include "client/ctl/run_plan.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

namespace moecached::ctl {
namespace {

constexpr const char* kPlugin = "libggml-moecache.so";
constexpr const char* kOverride = R"(\.ffn_(gate|up|down|gate_up)_exps=MOECACHE)";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_file(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

bool is_program(const std::string& path) { return is_file(path) && ::access(path.c_str(), X_OK) == 0; }

std::string absolute(const std::string& path) {
  std::error_code error;
  const std::filesystem::path full = std::filesystem::absolute(path, error);
  return error ? path : full.lexically_normal().string();
}

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') == std::string::npos ? 0 : path.rfind('/') + 1);
}

struct DaemonOption {
  std::string DaemonSizes::*value;
  const char* option;  // of `run`
  const char* flag;    // of the daemon
};
constexpr DaemonOption kDaemonOptions[] = {
    {&DaemonSizes::tiers, "--tiers", "--tiers"},
    {&DaemonSizes::pool_bytes, "--pool-bytes", "--pool-bytes"},
    {&DaemonSizes::slots, "--slots", "--pool-slots"},
    {&DaemonSizes::policy, "--policy", "--policy-default"},
    {&DaemonSizes::gpu_slots, "--gpu-slots", "--gpu-slots"},
    {&DaemonSizes::gpu_bytes, "--gpu-bytes", "--gpu-bytes"},
    {&DaemonSizes::gpu_keep_free, "--gpu-keep-free", "--gpu-keep-free"},
    {&DaemonSizes::gpu_policy, "--gpu-policy", "--gpu-policy"},
    {&DaemonSizes::gpu_max_slowdown, "--gpu-max-slowdown", "--gpu-max-slowdown"},
    {&DaemonSizes::gpu_mode, "--gpu-mode", "--gpu-mode"},
};

}  // namespace

std::vector<std::string> daemon_arguments(const DaemonSizes& sizes) {
  std::vector<std::string> arguments;
  for (const DaemonOption& option : kDaemonOptions) {
    const std::string& value = sizes.*option.value;
    if (!value.empty()) arguments.push_back(std::string(option.flag) + "=" + value);
  }
  return arguments;
}

std::string given_options(const DaemonSizes& sizes) {
  std::vector<std::string> given;
  for (const DaemonOption& option : kDaemonOptions) {
    if (!(sizes.*option.value).empty()) given.push_back(option.option);
  }
  std::string text;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (i > 0) text += i + 1 == given.size() ? " and " : ", ";
    text += given[i];
  }
  return text;
}

std::string executable_directory() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "" : self.parent_path().string();
}

PluginSearch find_plugin(const std::string& given, const std::string& directory) {
  std::vector<std::string> candidates;
  if (!given.empty()) {
    candidates = {given};
  } else {
    if (const std::string named = variable("MOECACHED_PLUGIN"); !named.empty()) candidates.push_back(named);
    for (const char* place : {"/", "/../lib/moecached/", "/../lib/", "/../../shim/ggml/", "/../../shim/"}) {
      candidates.push_back(directory + place + kPlugin);
    }
  }
  PluginSearch search;
  for (const std::string& candidate : candidates) {
    const std::string path = absolute(candidate);
    if (is_file(path)) {
      search.found = path;
      return search;
    }
    search.looked_at.append(search.looked_at.empty() ? "" : ", ").append(path);
  }
  return search;
}

std::string find_daemon(const std::string& directory) {
  if (const std::string named = variable("MOECACHED_DAEMON"); !named.empty())
    return is_program(named) ? absolute(named) : "";
  for (const char* place : {"/moecached", "/../../daemon/app/moecached"}) {
    if (const std::string path = directory + place; is_program(path)) return absolute(path);
  }
  return find_program("moecached").path;
}

ProgramSearch find_program(const std::string& name) {
  const auto check = [](const std::string& path) -> ProgramSearch {
    if (!is_file(path)) return {"", ENOENT};
    if (::access(path.c_str(), X_OK) != 0) return {"", EACCES};
    return {path, 0};
  };
  if (name.find('/') != std::string::npos) return check(name);
  ProgramSearch best{"", ENOENT};
  const std::string path = std::getenv("PATH") == nullptr ? "/usr/local/bin:/usr/bin:/bin" : variable("PATH");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    const std::string directory = path.substr(begin, end - begin);
    const ProgramSearch found = check((directory.empty() ? "." : directory) + "/" + name);
    if (!found.path.empty()) return found;
    if (found.error_number == EACCES) best = found;  // worth reporting, unless a later directory has it
    begin = end + 1;
  }
  return best;
}

std::vector<std::string> extra_flags(const std::vector<std::string>& command,
                                     std::string_view override_variable) {
  // Tools of llama.cpp that place no weights, and refuse the flag.
  constexpr std::array<std::string_view, 6> kNoModel = {"llama-quantize",   "llama-gguf",
                                                        "llama-gguf-split", "llama-gguf-hash",
                                                        "llama-tokenize",   "llama-convert-llama2c-to-ggml"};
  const std::string program = base_name(command.front());
  if (program != "llama" && !program.starts_with("llama-")) return {};
  if (std::ranges::find(kNoModel, program) != kNoModel.end()) return {};
  if (override_variable.find("MOECACHE") != std::string_view::npos) return {};
  for (std::size_t i = 1; i + 1 < command.size(); ++i) {
    const bool is_override = command[i] == "-ot" || command[i] == "--override-tensor";
    if (is_override && command[i + 1].find("MOECACHE") != std::string::npos) return {};
  }
  return {"-ot", kOverride};
}

std::vector<std::string> with_environment(const char* const* environment, const std::vector<std::string>& set,
                                          const std::vector<std::string>& unset) {
  const auto name_of = [](std::string_view entry) { return entry.substr(0, entry.find('=')); };
  std::vector<std::string> out;
  for (; *environment != nullptr; ++environment) {
    const std::string_view name = name_of(*environment);
    const bool replaced =
        std::ranges::any_of(set, [&](const std::string& entry) { return name_of(entry) == name; });
    const bool removed = std::ranges::find(unset, name) != unset.end();
    if (!replaced && !removed) out.emplace_back(*environment);
  }
  out.insert(out.end(), set.begin(), set.end());
  return out;
}

}  // namespace moecached::ctl
