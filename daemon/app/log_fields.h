// The convention of this daemon's log lines: a sentence, then key=value fields: "session opened id=3
// label=llama-server". A value reaches to the next field or the end, so it may hold spaces. Pure. Thread:
// any.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

namespace moecached {

struct LogFields {
  std::string_view sentence;
  std::vector<std::pair<std::string_view, std::string_view>>
      fields;  // in order; a repeated key is kept as it came
};

// Views into `line`.
[[nodiscard]] LogFields split_fields(std::string_view line);

}  // namespace moecached
