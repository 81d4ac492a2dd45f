#include "shim/ggml/spill_model.h"

#include <utility>

#include "shim/ggml/gpu_device.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"

namespace moecached::shim {

SpillModel::~SpillModel() {
  moecached_counters counters = {};
  moecached_model_counters(handle_, &counters);
  Session::instance().absorb(counters);
  moecached_model_close(handle_);
}

std::shared_ptr<SpillExperts> SpillExperts::open(moecached_session* session, std::vector<std::string> paths,
                                                 ggml_backend_dev_t device, std::string& error) {
  std::shared_ptr<SpillExperts> experts(new SpillExperts(session, std::move(paths)));
  return experts->on(device, error) == nullptr ? nullptr : experts;
}

std::shared_ptr<SpillModel> SpillExperts::on(ggml_backend_dev_t device, std::string& error) {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<SpillModel>& model : models_) {
    if (model->device() == device) return model;
  }
  GpuUuid uuid = {};
  error = uuid_of(device, uuid);
  if (!error.empty()) return nullptr;
  std::vector<const char*> names;
  for (const std::string& path : file_.paths()) names.push_back(path.c_str());
  moecached_model* handle = nullptr;
  if (moecached_spill_model_open(session_, names.data(), names.size(), uuid.data(), &handle) !=
      MOECACHED_OK) {
    error = moecached_last_error();
    return nullptr;
  }
  debug("%s is opened on %s, to spill", names.front(), device->iface.get_name(device));
  models_.push_back(std::make_shared<SpillModel>(handle, device));
  return models_.back();
}

int SpillExperts::add_tensor(const ggml_tensor& tensor, const TensorSource& source, std::string& reason) {
  const std::lock_guard lock(mutex_);
  // All GPUs have the same layers and parts: those of the file.
  const moecached_model* model = models_.front()->handle();
  auto added = std::make_unique<GpuTensor>();
  moecached_layer_info layer = {};
  if (moecached_model_find(model, tensor.name, &added->layer, &added->part) != MOECACHED_OK ||
      moecached_model_layer(model, added->layer, &layer) != MOECACHED_OK ||
      moecached_model_part(model, added->layer, added->part, &added->info) != MOECACHED_OK) {
    reason = "the daemon serves no such expert tensor";
    return -1;
  }
  added->n_experts = layer.n_experts;
  return keep_tensor(tensors_, std::move(added), file_, tensor, source, reason);
}

bool SpillExperts::read(std::size_t index, uint64_t offset, void* out, std::size_t bytes) const {
  return file_.read(tensor(index)->info, offset, out, bytes);
}

const GpuTensor* SpillExperts::tensor(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return tensors_[index].get();
}

std::vector<moecached_counters> SpillExperts::counters() const {
  const std::lock_guard lock(mutex_);
  std::vector<moecached_counters> counters(models_.size());
  for (std::size_t i = 0; i < models_.size(); ++i)
    moecached_model_counters(models_[i]->handle(), &counters[i]);
  return counters;
}

}  // namespace moecached::shim
