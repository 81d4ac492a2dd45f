// Finds the file and offset that a tensor's bytes came from, without reading them.
//
// Why: ggml hands a backend bytes, never positions. With a mapped load the kernel knows the position
// (/proc/self/maps); otherwise the loader still has the file open, the tensor is looked up in it by name, and
// a sample of pages over the whole tensor is compared, so that an equal name in another file is not taken for
// it. Thread: any.
#ifndef MOECACHED_SHIM_GGML_TENSOR_SOURCE_H_
#define MOECACHED_SHIM_GGML_TENSOR_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moecached::shim {

struct TensorSource {
  std::string path;
  uint64_t offset;  // bytes, in the file
};

// The mapping that holds `address`, from the text of /proc/<pid>/maps; nullopt when it is not a file's, or
// the file was deleted.
std::optional<TensorSource> source_in_maps(std::string_view maps, uintptr_t address);

// The position of `data` in a file mapped into this process.
std::optional<TensorSource> source_of_mapped(const void* data);

// The position of tensor `name` in a GGUF file this process has open, whose bytes there equal `data`.
std::optional<TensorSource> source_in_open_files(std::string_view name, const void* data, std::size_t bytes);

// All shards of the model that `path` belongs to, in order: the path itself, or its siblings by the
// "-00001-of-0000N.gguf" naming.
std::vector<std::string> shard_paths(const std::string& path);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_TENSOR_SOURCE_H_
