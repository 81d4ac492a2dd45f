#include "shim/ggml/model.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

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

std::shared_ptr<Model> Model::open(moecached_session* session, std::vector<std::string> paths,
                                   std::string& error) {
  std::vector<const char*> names;
  for (const std::string& path : paths) names.push_back(path.c_str());
  moecached_model* handle = nullptr;
  if (moecached_model_open(session, names.data(), names.size(), &handle) != MOECACHED_OK) {
    error = moecached_last_error();
    return nullptr;
  }
  return std::shared_ptr<Model>(new Model(handle, std::move(paths)));
}

Model::Model(moecached_model* model, std::vector<std::string> paths)
    : model_(model), paths_(std::move(paths)) {
  for (const std::string& path : paths_) files_.push_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  take_layers();
}

Model::~Model() {
  Session::instance().absorb(counters());
  moecached_model_close(model_);
  for (const int file : files_) {
    if (file >= 0) close(file);
  }
}

moecached_counters Model::counters() const {
  moecached_counters counters = {};
  moecached_model_counters(model_, &counters);
  return counters;
}

void Model::take_layers() {
  generation_ = moecached_model_generation(model_);
  layers_.resize(moecached_model_layers(model_));
  for (uint32_t layer = 0; layer < layers_.size(); ++layer)
    moecached_model_layer(model_, layer, &layers_[layer]);
}

void Model::place(WindowTensor& tensor) const {
  const moecached_layer_info& layer = layers_[tensor.layer];
  // The stock kernels take the distance of two experts from nb, so the parts of a record may lie between
  // them.
  const int expert_dimension = tensor.is_bias ? 1 : 2;
  ggml_tensor& window = tensor.window;
  window.ne[expert_dimension] = layer.n_window_slots;
  window.nb[expert_dimension] = layer.slot_stride;
  for (int i = expert_dimension + 1; i < GGML_MAX_DIMS; ++i) {
    window.nb[i] = window.nb[i - 1] * static_cast<std::size_t>(window.ne[i - 1]);
  }
  window.data = const_cast<char*>(static_cast<const char*>(layer.window) +
                                  tensor.info.slot_offset);  // kernels only read src[0]
}

const WindowTensor* Model::add_tensor(const ggml_tensor& tensor, const TensorSource& source,
                                      std::string& reason) {
  auto added = std::make_unique<WindowTensor>();
  if (moecached_model_find(model_, tensor.name, &added->layer, &added->part) != MOECACHED_OK ||
      moecached_model_part(model_, added->layer, added->part, &added->info) != MOECACHED_OK) {
    reason = "the daemon serves no such expert tensor";
    return nullptr;
  }
  const moecached_part_info& info = added->info;
  const int64_t n_experts = layers_[added->layer].n_experts;
  added->is_bias = info.ne1 == 1 && tensor.ne[2] == 1 && tensor.ne[1] == n_experts;
  const int expert_dimension = added->is_bias ? 1 : 2;
  if (static_cast<uint32_t>(tensor.type) != info.ggml_type ||
      tensor.ne[0] != static_cast<int64_t>(info.ne0) ||
      (!added->is_bias && tensor.ne[1] != static_cast<int64_t>(info.ne1)) ||
      tensor.ne[expert_dimension] != n_experts || tensor.nb[expert_dimension] != info.expert_bytes ||
      tensor.ne[3] != 1) {
    reason = "its type or shape here is not that of the file";
    return nullptr;
  }
  if (info.file >= paths_.size() || source.offset != info.file_offset ||
      !is_same_file(source.path, paths_[info.file])) {
    reason = "its bytes do not come from the place in the file that the daemon reads";
    return nullptr;
  }
  added->window = tensor;
  added->window.view_src = nullptr;
  place(*added);
  const std::lock_guard lock(mutex_);
  tensors_.push_back(std::move(added));
  return tensors_.back().get();
}

bool Model::read(const WindowTensor& tensor, uint64_t offset, void* out, std::size_t bytes) const {
  auto* at = static_cast<char*>(out);
  uint64_t position = tensor.info.file_offset + offset;
  while (bytes > 0) {
    const ssize_t got = pread(files_[tensor.info.file], at, bytes, static_cast<off_t>(position));
    if (got <= 0) return false;
    at += got;
    position += static_cast<uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void Model::refresh() {
  if (moecached_model_generation(model_) == generation_) return;
  take_layers();
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<WindowTensor>& tensor : tensors_) place(*tensor);
  debug("the windows of %s have moved", paths_.front().c_str());
}

}  // namespace moecached::shim
