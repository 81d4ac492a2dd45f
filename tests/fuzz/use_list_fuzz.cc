// Files that say which experts are used much: hot lists, counts as CSV, imatrix files of both kinds.
#include "daemon/warmth/hot_list.h"
#include "daemon/warmth/prewarm_source.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

constexpr BlockShape kShapes[] = {
    {.block = 0, .n_experts = 4}, {.block = 1, .n_experts = 4}, {.block = 7, .n_experts = 2}};

bool equal(const std::vector<UseList>& a, const std::vector<UseList>& b) {
  return std::ranges::equal(a, b, [](const UseList& x, const UseList& y) {
    return x.label == y.label &&
           std::ranges::equal(x.layers, y.layers, [](const LayerUses& l, const LayerUses& m) {
             return l.block == m.block && l.counts == m.counts;
           });
  });
}

void try_hot_list(std::string_view text) {
  const Result<HotLists> lists = parse_hot_lists(text);
  if (!lists) return check_fault(lists.error());
  const std::string printed = print_hot_lists(lists->key, "model", lists->lists);
  const Result<HotLists> again = parse_hot_lists(printed);
  CHECK(again && again->sealed && again->key == lists->key && equal(again->lists, lists->lists));
}

void run(std::span<const std::uint8_t> bytes) {
  try_hot_list({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  const UniqueFd file = file_of(std::as_bytes(bytes));
  const Result<UseList> list = read_prewarm_source(file.get(), kShapes);
  if (!list) return check_fault(list.error());
  CHECK(list->layers.size() == std::size(kShapes));
  for (std::size_t i = 0; i < std::size(kShapes); ++i) {
    CHECK(list->layers[i].block == kShapes[i].block && list->layers[i].counts.size() == kShapes[i].n_experts);
    for (const std::uint64_t count : list->layers[i].counts) CHECK(count <= kUseCountMax * kUseLabelsMax);
  }
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run({data, size});
  return 0;
}
