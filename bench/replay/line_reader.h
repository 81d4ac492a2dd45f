// Lines of a text file, plain or zstd (told by its first bytes, not by its name). It does not know what the
// lines mean. Thread: one. Memory: one input buffer, zstd's window (at most 128 MiB) and one line, whose
// length is limited; a line is valid until the next call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "daemon/base/result.h"

namespace moecached::replay {

class LineReader {
 public:
  static constexpr std::size_t kLineBytesMax = 16u << 20;

  // "-" is standard input. kSystem, kUnsupported: the text names the file.
  [[nodiscard]] static Result<std::unique_ptr<LineReader>> open(const std::string& path);
  virtual ~LineReader() = default;

  // False at the end of the file. A line comes without its end ("\n" or "\r\n").
  [[nodiscard]] virtual Result<bool> next(std::string_view* line) = 0;
  [[nodiscard]] virtual std::uint64_t line_number() const = 0;  // of the line that next() gave, from 1
};

}  // namespace moecached::replay
