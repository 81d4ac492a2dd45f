// GGUF headers, shards, and the layout of a model. An input is a GGUF, or a set of shards as shard_set.h
// packs them.
#include "tests/fuzz/layout_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moecached::fuzz;
  check_layout(ModelFiles(std::as_bytes(std::span(data, size))));
  return 0;
}
