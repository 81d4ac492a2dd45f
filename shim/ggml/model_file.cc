#include "shim/ggml/model_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace moecached::shim {
namespace {

bool is_same_file(const std::string& left, const std::string& right) {
  if (left == right) return true;
  struct stat left_status;
  struct stat right_status;
  return stat(left.c_str(), &left_status) == 0 && stat(right.c_str(), &right_status) == 0 &&
         left_status.st_dev == right_status.st_dev && left_status.st_ino == right_status.st_ino;
}

}  // namespace

ModelFile::ModelFile(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) files_.push_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

ModelFile::~ModelFile() {
  for (const int file : files_) {
    if (file >= 0) close(file);
  }
}

std::string ModelFile::mismatch(const ggml_tensor& tensor, const TensorSource& source,
                                const moecached_part_info& part, int64_t n_experts) const {
  const bool bias = is_bias(tensor, part, n_experts);
  const int expert_dimension = bias ? 1 : 2;
  if (static_cast<uint32_t>(tensor.type) != part.ggml_type ||
      tensor.ne[0] != static_cast<int64_t>(part.ne0) ||
      (!bias && tensor.ne[1] != static_cast<int64_t>(part.ne1)) || tensor.ne[expert_dimension] != n_experts ||
      tensor.nb[expert_dimension] != part.expert_bytes || tensor.ne[3] != 1) {
    return "its type or shape here is not that of the file";
  }
  if (part.file >= paths_.size() || source.offset != part.file_offset ||
      !is_same_file(source.path, paths_[part.file])) {
    return "its bytes do not come from the place in the file that the daemon reads";
  }
  return "";
}

bool ModelFile::read(const moecached_part_info& part, uint64_t offset, void* out, std::size_t bytes) const {
  auto* at = static_cast<char*>(out);
  uint64_t position = part.file_offset + offset;
  while (bytes > 0) {
    const ssize_t got = pread(files_[part.file], at, bytes, static_cast<off_t>(position));
    if (got <= 0) return false;
    at += got;
    position += static_cast<uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool is_bias(const ggml_tensor& tensor, const moecached_part_info& part, int64_t n_experts) {
  return part.ne1 == 1 && tensor.ne[2] == 1 && tensor.ne[1] == n_experts;
}

void set_slots(ggml_tensor& window, bool bias, int64_t n_slots, std::size_t slot_stride) {
  const int expert_dimension = bias ? 1 : 2;
  window.ne[expert_dimension] = n_slots;
  window.nb[expert_dimension] = slot_stride;
  for (int i = expert_dimension + 1; i < GGML_MAX_DIMS; ++i) {
    window.nb[i] = window.nb[i - 1] * static_cast<std::size_t>(window.ne[i - 1]);
  }
}

}  // namespace moecached::shim
