// What the targets of model files share: a set of files, and what a layout that was read from it must be.
#pragma once

#include <sys/stat.h>

#include <cstdio>
#include <vector>

#include "daemon/model/model_layout.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/shard_set.h"
#include "tests/support/layout_check.h"

namespace moecached::fuzz {

struct ModelFiles {
  explicit ModelFiles(std::span<const std::byte> input) {
    for (const Shard& shard : unpack_shards(input)) {
      files.push_back(file_of(shard.bytes, shard.file_bytes));
      fds.push_back(files.back().get());
    }
  }
  std::vector<UniqueFd> files;
  std::vector<int> fds;
};

inline void check_layout(const ModelFiles& files) {
  std::vector<std::uint64_t> sizes;
  for (const int fd : files.fds) {
    struct stat status {};
    CHECK(::fstat(fd, &status) == 0);
    sizes.push_back(static_cast<std::uint64_t>(status.st_size));
  }
  constexpr std::uint32_t kAlignment = 512;
  const Result<ModelLayout> layout = read_model_layout(files.fds, {.direct_alignment = kAlignment});
  if (!layout) return check_fault(layout.error());
  const std::string wrong = test::unsound(*layout, sizes, kAlignment);
  if (!wrong.empty()) std::fprintf(stderr, "unsound: %s\n", wrong.c_str());
  CHECK(wrong.empty());
  check_text(layout->architecture);
  check_text(layout->name);
  for (const LeftOut& left : layout->left_out) {
    check_text(left.tensor);
    check_text(left.reason);
  }
  for (const LayerLayout& layer : layout->layers) {
    for (const PartLayout& part : layer.parts) check_text(part.name);
  }
}

}  // namespace moecached::fuzz
