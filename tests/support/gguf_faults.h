// A file, or a set of shards, for every kind of fault that GGUF readers are known to have had: counts,
// products, sums, paddings and lengths that wrap or lie, types taken for others, tensors that overlap, shards
// that do not belong together. Made, not kept: the same bytes each time. Tests read each; fuzzers begin with
// them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moecached::test {

struct GgufFaultFile {
  std::string name;  // fit for a file name
  std::vector<std::vector<std::byte>> shards;
};

[[nodiscard]] std::vector<GgufFaultFile> gguf_fault_files();

}  // namespace moecached::test
