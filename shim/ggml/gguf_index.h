// Where each tensor of a GGUF file lies, read by the host's own parser (metadata only, no tensor data).
//
// What it is not: the product's GGUF reader; that one is in the daemon, which also judges the file. The host
// parses the same file anyway before any of this runs. Thread: any; an index is immutable. Memory: the cache
// keeps the indexes of the files seen, some 100 bytes a tensor.
#ifndef MOECACHED_SHIM_GGML_GGUF_INDEX_H_
#define MOECACHED_SHIM_GGML_GGUF_INDEX_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moecached::shim {

struct ByteRange {
  uint64_t begin;
  uint64_t end;  // one past the last byte
  bool operator==(const ByteRange&) const = default;
};

// True for the tensors of routed experts ("blk.3.ffn_up_exps.weight"): those the daemon reads, so that nobody
// else needs to.
bool is_expert_tensor(std::string_view name);

class GgufIndex {
 public:
  struct Entry {
    uint64_t offset;  // bytes, in the file
    uint64_t bytes;
  };

  explicit GgufIndex(std::map<std::string, Entry, std::less<>> entries) : entries_(std::move(entries)) {}

  // nullptr when the file has no such tensor.
  const Entry* find(std::string_view tensor) const;
  bool has_experts() const;
  // What is left of [0, file_bytes) without the expert tensors, ascending.
  std::vector<ByteRange> ranges_without_experts(uint64_t file_bytes) const;

 private:
  std::map<std::string, Entry, std::less<>> entries_;
};

// The index of the file behind an open descriptor, from a cache keyed by the file's identity; nullptr when it
// is not a GGUF file. Leaves the descriptor's position alone.
std::shared_ptr<const GgufIndex> gguf_index_of(int fd);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_GGUF_INDEX_H_
