#include "daemon/platform/memory_info.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace moecached {
namespace {

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The first number of a text; nothing for "max" and the like.
std::optional<std::uint64_t> first_number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t\n");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data() + start, text.data() + text.size(), value);
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

// The number behind `key` at the start of a line.
std::optional<std::uint64_t> number_of(std::string_view text, std::string_view key) {
  for (std::size_t line = 0; line < text.size();) {
    if (text.substr(line, key.size()) == key) return first_number(text.substr(line + key.size()));
    const std::size_t end = text.find('\n', line);
    if (end == std::string_view::npos) break;
    line = end + 1;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> number_in(const std::string& path) {
  const std::optional<std::string> text = read_text(path);
  return text ? first_number(*text) : std::nullopt;
}

std::uint64_t subtract(std::uint64_t from, std::uint64_t what) { return from > what ? from - what : 0; }

void limit_available(MemoryInfo& info, std::uint64_t bytes, std::string_view by) {
  if (bytes >= info.available_bytes) return;
  info.available_bytes = bytes;
  info.limited_by = by;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive_file;  // keys in memory.stat
  const char* active_file;
};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file ", "active_file "};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
                          "total_active_file "};

// A group is limited by each of its ancestors as well, so walk up to the mount point.
void apply_cgroup(MemoryInfo& info, const std::string& root, const std::string& mount, std::string group,
                  const CgroupFiles& files) {
  while (true) {
    const std::string folder = mount + group;
    const std::optional<std::uint64_t> limit = number_in(root + folder + "/" + files.limit);
    // v1 says "no limit" with a number close to 2^63.
    if (limit && *limit < (std::uint64_t{1} << 62)) {
      info.total_bytes = std::min(info.total_bytes, *limit);
      const std::uint64_t used = number_in(root + folder + "/" + files.usage).value_or(0);
      const std::string stat = read_text(root + folder + "/memory.stat").value_or("");
      // Page cache of files counts as used but is given back under pressure; shared memory is not in these
      // two.
      const std::uint64_t cache =
          number_of(stat, files.inactive_file).value_or(0) + number_of(stat, files.active_file).value_or(0);
      limit_available(info, subtract(*limit, subtract(used, cache)), folder + "/" + files.limit);
    }
    const std::size_t slash = group.rfind('/');
    if (slash == std::string::npos) return;
    group.resize(slash);
  }
}

void apply_cgroups(MemoryInfo& info, const std::string& root) {
  const std::optional<std::string> groups = read_text(root + "/proc/self/cgroup");
  if (!groups) return;
  std::istringstream lines(*groups);
  for (std::string line; std::getline(lines, line);) {  // "hierarchy:controllers:path"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).push_back(',');
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers == ",,") {
      // Where a container's view of the path does not match its mount, the walk up still meets the mount's
      // own files.
      apply_cgroup(info, root, "/sys/fs/cgroup", group, kV2);
      apply_cgroup(info, root, "/sys/fs/cgroup/unified", group, kV2);
    } else if (controllers.find(",memory,") != std::string::npos) {
      apply_cgroup(info, root, "/sys/fs/cgroup/memory", group, kV1);
    }
  }
}

}  // namespace

Result<MemoryInfo> read_memory_info(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const std::optional<std::string> text = read_text(path);
  if (!text) return Fault{FaultCode::kSystem, path + " cannot be read"};
  const auto kib = [&](std::string_view key) { return number_of(*text, key).value_or(0) * 1024; };
  MemoryInfo info;
  info.total_bytes = kib("MemTotal:");
  info.available_bytes = std::numeric_limits<std::uint64_t>::max();
  limit_available(info, kib("MemAvailable:"), "MemAvailable");
  if (info.total_bytes == 0) return Fault{FaultCode::kSystem, path + " has no MemTotal line"};
  // Under strict overcommit pages of shared memory are charged when they are first touched, and a refusal is
  // SIGBUS.
  if (number_in(root + "/proc/sys/vm/overcommit_memory").value_or(0) == 2) {
    limit_available(info, subtract(kib("CommitLimit:"), kib("Committed_AS:")),
                    "CommitLimit (vm.overcommit_memory = 2)");
  }
  apply_cgroups(info, root);
  return info;
}

std::uint64_t machine_memory_bytes() {
  const Result<MemoryInfo> info = read_memory_info();
  return info ? info->total_bytes : 0;
}

std::string bytes_for_people(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[64];
  if (unit == 0) {
    std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
  } else {
    std::snprintf(text, sizeof text, "%.2f %s (%llu bytes)", value, kUnits[unit],
                  static_cast<unsigned long long>(bytes));
  }
  return text;
}

}  // namespace moecached
