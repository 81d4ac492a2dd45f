// How much memory this machine or container has, and how much of it is free: the smallest of what
// /proc/meminfo and every memory cgroup above us (v2 and v1) say. Numbers for decisions before a big
// allocation, not a promise. Thread: any.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/base/result.h"

namespace moecached {

struct MemoryInfo {
  std::uint64_t total_bytes = 0;      // the smaller of MemTotal and the cgroup limits
  std::uint64_t available_bytes = 0;  // can still be used without swapping, page cache given up
  std::string limited_by;  // what makes available_bytes the smallest: "MemAvailable", a cgroup file, ...
};

// root: where /proc and /sys/fs/cgroup are looked for; tests pass a folder of their own.
[[nodiscard]] Result<MemoryInfo> read_memory_info(const std::string& root = "");

// The total alone; 0 when /proc cannot be read.
[[nodiscard]] std::uint64_t machine_memory_bytes();

// "1.50 GiB (1610612736 bytes)", for fault texts.
[[nodiscard]] std::string bytes_for_people(std::uint64_t bytes);

}  // namespace moecached
