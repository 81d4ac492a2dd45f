// Hot lists as text: moecounts-csv v1, which people and other tools can read and write as well.
//
//   line 1  "# moecounts-csv v1 " and a JSON object, of which only "key" is looked at: the model's
//   fingerprint line 2  workload,layer,c0,c1,..: the names of the columns then    a row a layer of each
//   workload; layer: N of "blk.N."; fewer counts than columns: fewer experts at last "# end " and 16
//   hexadecimal digits: FNV-1a of all before. The daemon's own files have it; a file
//           without it was cut off, or is somebody else's
//
// Every number is checked against use_list.h; a fault names line and column, never what stands there: the
// file may be one that the asker could not read. Pure. Thread: any. Memory: what the lists take.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/warmth/use_list.h"

namespace moecached {

inline constexpr std::size_t kHotListBytesMax = 64u << 20;

struct HotLists {
  std::uint64_t key = 0;  // 0: none given
  bool sealed = false;    // its last line is there, and true
  std::vector<UseList> lists;
};

[[nodiscard]] bool looks_like_hot_list(std::string_view text);
// kInvalid, kLimit.
[[nodiscard]] Result<HotLists> parse_hot_lists(std::string_view text);
// `model`: for people. REQUIRES: labels are file_label()s.
[[nodiscard]] std::string print_hot_lists(std::uint64_t key, std::string_view model,
                                          const std::vector<UseList>& lists);

}  // namespace moecached
