// Which addresses are mappings of GGUF files with experts, and which parts of them hold no experts.
//
// Pure bookkeeping for the load hook: it maps and advises nothing. Thread: one at a time (the hook locks).
#ifndef MOECACHED_SHIM_GGML_MAPPED_RANGES_H_
#define MOECACHED_SHIM_GGML_MAPPED_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "shim/ggml/gguf_index.h"

namespace moecached::shim {

class MappedRanges {
 public:
  // [address, address + bytes) maps the file from file_offset on; `wanted`: ascending byte ranges of the file
  // worth having in memory. Replaces whatever was known about these addresses.
  void add(uintptr_t address, std::size_t bytes, uint64_t file_offset,
           std::shared_ptr<const std::vector<ByteRange>> wanted);
  // The addresses are no longer such a mapping (unmapped, or mapped to something else).
  void remove(uintptr_t address, std::size_t bytes);

  bool empty() const { return ranges_.empty(); }
  // True when all of [address, address + bytes) lies in one known mapping.
  bool covers(uintptr_t address, std::size_t bytes) const;
  // The wanted parts of [address, address + bytes) as addresses, ascending.
  std::vector<ByteRange> wanted_in(uintptr_t address, std::size_t bytes) const;

 private:
  struct Mapping {
    uintptr_t end;
    uint64_t file_offset;  // of the first address
    std::shared_ptr<const std::vector<ByteRange>> wanted;
  };
  std::map<uintptr_t, Mapping> ranges_;  // by first address, disjoint
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_MAPPED_RANGES_H_
