#include "shim/ggml/model.h"

#include <utility>

#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {

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
    : model_(model), file_(std::move(paths)) {
  take_layers();
}

Model::~Model() {
  Session::instance().absorb(counters());
  moecached_model_close(model_);
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
  ggml_tensor& window = tensor.window;
  set_slots(window, tensor.is_bias, layer.n_window_slots, layer.slot_stride);
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
  const int64_t n_experts = layers_[added->layer].n_experts;
  added->is_bias = is_bias(tensor, added->info, n_experts);
  reason = file_.mismatch(tensor, source, added->info, n_experts);
  if (!reason.empty()) return nullptr;
  added->window = tensor;
  added->window.view_src = nullptr;
  place(*added);
  const std::lock_guard lock(mutex_);
  tensors_.push_back(std::move(added));
  return tensors_.back().get();
}

bool Model::read(const WindowTensor& tensor, uint64_t offset, void* out, std::size_t bytes) const {
  return file_.read(tensor.info, offset, out, bytes);
}

void Model::refresh() {
  if (moecached_model_generation(model_) == generation_) return;
  take_layers();
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<WindowTensor>& tensor : tensors_) place(*tensor);
  debug("the windows of %s have moved", file_.paths().front().c_str());
}

}  // namespace moecached::shim
