// Headers of safetensors, the two JSON files beside them, and the layout of a model. An input is one file, or
// a set of them as shard_set.h packs them. Every reader is given every file: a set is refused at the first
// fault.
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "daemon/model/hf_files.h"
#include "daemon/model/safetensors.h"
#include "tests/fuzz/layout_fuzz.h"

namespace moecached::fuzz {
namespace {

// Tensors lie side by side from the header's end to the file's, each as large as it says.
void check_file(const SafetensorsFile& file, std::uint64_t header_bytes) {
  std::vector<std::tuple<std::uint64_t, std::uint64_t>> extents;
  std::vector<std::string_view> names;
  for (const SafetensorsTensor& tensor : file.tensors) {
    CHECK(!tensor.name.empty() && tensor.name.size() <= kSafetensorsNameBytesMax);
    CHECK(tensor.n_dims <= kSafetensorsDimensionsMax && std::string_view(tensor.dtype) != "");
    extents.emplace_back(tensor.offset, tensor.bytes);
    names.push_back(tensor.name);
  }
  std::ranges::sort(names);
  CHECK(std::ranges::adjacent_find(names) == names.end());
  std::ranges::sort(extents);
  std::uint64_t covered = sizeof(std::uint64_t) + header_bytes;
  for (const auto& [offset, bytes] : extents) {
    CHECK(offset == covered && bytes <= file.file_bytes - covered);
    covered += bytes;
  }
  CHECK(covered == file.file_bytes);
}

void check_index(const SafetensorsIndex& index) {
  CHECK(index.entries.size() <= kSafetensorsTensorsMax && index.n_files <= index.entries.size());
  CHECK(std::ranges::is_sorted(index.entries, {}, &SafetensorsIndex::Entry::tensor));
  for (const SafetensorsIndex::Entry& entry : index.entries) CHECK(entry.file < index.n_files);
}

void read_alone(int fd) {
  const auto header_bytes = safetensors_header_bytes(fd);
  CHECK(header_bytes);  // any file has an answer
  if (const auto file = read_safetensors(fd); file) {
    CHECK(*header_bytes != 0);
    check_file(*file, *header_bytes);
    CHECK(!read_safetensors(fd, *header_bytes - 1));
  } else {
    check_fault(file.error());
  }
  if (const auto index = read_safetensors_index(fd); !index) {
    check_fault(index.error());
  } else if (*index) {
    check_index(**index);
  }
  if (const auto config = read_hf_config(fd); config) {
    check_text(config->model_type);
    check_text(config->name);
    CHECK(config->n_expert_used >= 1 && config->n_expert_used <= MOECACHED_MAX_EXPERTS);
    CHECK(config->n_experts <= MOECACHED_MAX_EXPERTS);
  } else {
    check_fault(config.error());
  }
}

void run(std::span<const std::byte> input) {
  const ModelFiles files(input);
  for (const int fd : files.fds) read_alone(fd);
  check_layout(files);
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run(std::as_bytes(std::span(data, size)));
  return 0;
}
