// GGUF headers, shards, and the layout of a model. An input is a GGUF, or a set of shards as shard_set.h
// packs them.
#include <sys/stat.h>

#include <vector>

#include "daemon/model/model_layout.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/shard_set.h"
#include "tests/support/layout_check.h"

namespace moecached::fuzz {
namespace {

void run(std::span<const std::uint8_t> bytes) {
  std::vector<UniqueFd> files;
  for (const Shard& shard : unpack_shards(std::as_bytes(bytes)))
    files.push_back(file_of(shard.bytes, shard.file_bytes));
  std::vector<int> fds;
  std::vector<std::uint64_t> sizes;
  for (const UniqueFd& file : files) {
    struct stat status {};
    CHECK(::fstat(file.get(), &status) == 0);
    fds.push_back(file.get());
    sizes.push_back(static_cast<std::uint64_t>(status.st_size));
  }
  constexpr std::uint32_t kAlignment = 512;
  const Result<ModelLayout> layout = read_model_layout(fds, {.direct_alignment = kAlignment});
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

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run({data, size});
  return 0;
}
