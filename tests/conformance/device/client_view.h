// How a client, another process, sees a pool of one kind of device. Runs in a forked child: system calls
// only, no gtest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moecached {

// Returns null when the client could read exactly `expected` and could not change a byte by any means it has;
// otherwise what went wrong.
using ClientView = const char* (*)(int fd, std::span<const std::byte> expected);

const char* host_client(int fd, std::span<const std::byte> expected);

}  // namespace moecached
