#include "shim/ggml/mapped_ranges.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moecached::shim {

void MappedRanges::add(uintptr_t address, std::size_t bytes, uint64_t file_offset,
                       std::shared_ptr<const std::vector<ByteRange>> wanted) {
  remove(address, bytes);
  ranges_[address] = {address + bytes, file_offset, std::move(wanted)};
}

void MappedRanges::remove(uintptr_t address, std::size_t bytes) {
  const uintptr_t end = address + bytes;
  auto at = ranges_.upper_bound(address);
  if (at != ranges_.begin() && std::prev(at)->second.end > address) --at;
  while (at != ranges_.end() && at->first < end) {
    const uintptr_t begin = at->first;
    const Mapping mapping = at->second;
    at = ranges_.erase(at);
    if (begin < address) ranges_[begin] = {address, mapping.file_offset, mapping.wanted};
    if (mapping.end > end) ranges_[end] = {mapping.end, mapping.file_offset + (end - begin), mapping.wanted};
  }
}

bool MappedRanges::covers(uintptr_t address, std::size_t bytes) const {
  const auto after = ranges_.upper_bound(address);
  return after != ranges_.begin() && std::prev(after)->second.end >= address + bytes;
}

std::vector<ByteRange> MappedRanges::wanted_in(uintptr_t address, std::size_t bytes) const {
  std::vector<ByteRange> result;
  const auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return result;
  const auto& [begin, mapping] = *std::prev(after);
  const uintptr_t end = std::min<uintptr_t>(address + bytes, mapping.end);
  for (const ByteRange& range : *mapping.wanted) {
    if (range.end <= mapping.file_offset) continue;
    const uintptr_t from =
        range.begin <= mapping.file_offset ? begin : begin + (range.begin - mapping.file_offset);
    const uintptr_t to = begin + (range.end - mapping.file_offset);
    const uintptr_t first = std::max(address, from);
    const uintptr_t last = std::min(end, to);
    if (first < last) result.push_back({first, last});
  }
  return result;
}

}  // namespace moecached::shim
