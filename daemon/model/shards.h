// The shards of one model, as llama.cpp's gguf-split writes them, read and found to belong together: split.no
// counts up from 0, split.count and split.tensors.count agree, no tensor is in two shards. The first shard's
// keys describe the model. Thread: any. Memory: bounded as in gguf.h, for all shards together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/model/gguf.h"

namespace moecached {

struct ShardTensor {
  GgufTensor tensor;
  std::uint32_t file = 0;  // index of the shard
};

struct ShardSet {
  std::uint32_t n_files = 0;
  GgufFile first;                    // its tensors have moved to `tensors`
  std::vector<ShardTensor> tensors;  // in the order of the shards
};

// fds: borrowed, one per shard, in order.
[[nodiscard]] Result<ShardSet> read_shards(std::span<const int> fds);

}  // namespace moecached
