// Any file that says which experts are used much: an imatrix (GGUF or legacy), moecounts-csv, a hot list.
// Told apart by how it begins. Regular files only. Thread: any, not the core loop: it reads.
#pragma once

#include <span>
#include <string>

#include "daemon/base/result.h"
#include "daemon/warmth/use_list.h"

namespace moecached {

// Fitted to `shapes`, all workloads summed up. fd: borrowed.
[[nodiscard]] Result<UseList> read_prewarm_source(int fd, std::span<const BlockShape> shapes);

// A whole file of at most `bytes_max`, opened without waiting (a FIFO is no file). kNotFound: it is not
// there.
[[nodiscard]] Result<std::string> read_small_file(const std::string& path, std::size_t bytes_max);

}  // namespace moecached
