#include "shim/ggml/gpu_model.h"

#include <utility>

#include "shim/ggml/foreign_buffer.h"
#include "shim/ggml/gpu_device.h"
#include "shim/ggml/host_api.h"
#include "shim/ggml/log.h"

namespace moecached::shim {
int keep_tensor(std::vector<std::unique_ptr<GpuTensor>>& tensors, std::unique_ptr<GpuTensor> found,
                const ModelFile& file, const ggml_tensor& tensor, const TensorSource& source,
                std::string& reason) {
  found->is_bias = is_bias(tensor, found->info, found->n_experts);
  reason = file.mismatch(tensor, source, found->info, found->n_experts);
  if (!reason.empty()) return -1;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->layer == found->layer && tensors[i]->part == found->part) return static_cast<int>(i);
  }
  found->shape = tensor;
  tensors.push_back(std::move(found));
  return static_cast<int>(tensors.size()) - 1;
}

GpuWindows::GpuWindows(const GpuModel& model, const std::vector<std::unique_ptr<GpuTensor>>& tensors)
    // First: a move while the windows are taken is then seen as one, and they are taken again.
    : generation_(model.generation()), buffer_(make_foreign_buffer(model.device())) {
  const uint32_t n_expert_used = moecached_gpu_model_expert_used(model.handle());
  windows_.reserve(tensors.size());
  for (const std::unique_ptr<GpuTensor>& tensor : tensors) {
    moecached_gpu_layer_info layer = {};
    moecached_part_info part = {};
    uint64_t address = 0;
    moecached_gpu_model_layer(model.handle(), tensor->layer, &layer);
    moecached_gpu_model_part(model.handle(), tensor->layer, tensor->part, &part, &address);
    GpuWindow& window = windows_.emplace_back();
    window.model = &model;
    window.layer = tensor->layer;
    window.n_expert_used = n_expert_used;
    window.n_experts = tensor->n_experts;
    window.by_expert = layer.by_expert != 0;
    window.whole = layer.all_resident != 0;
    window.table = layer.table;
    window.tensor = tensor->shape;
    window.tensor.view_src = nullptr;
    window.tensor.buffer = buffer_;
    window.tensor.data = reinterpret_cast<void*>(address);
    set_slots(window.tensor, tensor->is_bias, layer.n_slots, tensor->info.expert_bytes);
    window.fetches = layer.n_slots_fetched > 0;
    window.fetched = window.tensor;
    if (window.fetches)
      set_slots(window.fetched, tensor->is_bias, layer.n_slots_fetched, tensor->info.expert_bytes);
  }
}

GpuWindows::~GpuWindows() { host().ggml_backend_buffer_free(buffer_); }

std::shared_ptr<GpuExperts> GpuExperts::open(moecached_session* session, std::vector<std::string> paths,
                                             ggml_backend_dev_t device, std::string& error, bool* spills) {
  std::shared_ptr<GpuExperts> experts(new GpuExperts(session, std::move(paths)));
  return experts->on(device, error, spills) == nullptr ? nullptr : experts;
}

std::shared_ptr<GpuModel> GpuExperts::on(ggml_backend_dev_t device, std::string& error, bool* spills) {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<GpuModel>& model : models_) {
    if (model->device() == device) return model;
  }
  GpuUuid uuid = {};
  error = uuid_of(device, uuid);
  if (!error.empty()) return nullptr;
  std::vector<const char*> names;
  for (const std::string& path : file_.paths()) names.push_back(path.c_str());
  moecached_gpu_model* handle = nullptr;
  const moecached_status status =
      moecached_gpu_model_open(session_, names.data(), names.size(), uuid.data(), &handle);
  if (status != MOECACHED_OK) {
    if (spills != nullptr) *spills = status == MOECACHED_E_SPILL;
    error = moecached_last_error();
    return nullptr;
  }
  debug("%s is opened on %s", names.front(), device->iface.get_name(device));
  models_.push_back(std::make_shared<GpuModel>(handle, device));
  return models_.back();
}

int GpuExperts::add_tensor(const ggml_tensor& tensor, const TensorSource& source, std::string& reason) {
  const std::lock_guard lock(mutex_);
  // All GPUs have the same layers and parts: those of the file.
  const moecached_gpu_model* model = models_.front()->handle();
  auto added = std::make_unique<GpuTensor>();
  moecached_gpu_layer_info layer = {};
  uint64_t address = 0;
  if (moecached_gpu_model_find(model, tensor.name, &added->layer, &added->part) != MOECACHED_OK ||
      moecached_gpu_model_layer(model, added->layer, &layer) != MOECACHED_OK ||
      moecached_gpu_model_part(model, added->layer, added->part, &added->info, &address) != MOECACHED_OK) {
    reason = "the daemon serves no such expert tensor";
    return -1;
  }
  added->n_experts = layer.n_experts;
  return keep_tensor(tensors_, std::move(added), file_, tensor, source, reason);
}

bool GpuExperts::read(std::size_t index, uint64_t offset, void* out, std::size_t bytes) const {
  moecached_part_info part = {};
  {
    const std::lock_guard lock(mutex_);
    part = tensors_[index]->info;
  }
  return file_.read(part, offset, out, bytes);
}

std::shared_ptr<const GpuWindows> GpuExperts::windows(GpuModel& model) {
  const std::lock_guard lock(mutex_);
  const bool is_current = model.windows_ != nullptr && model.windows_->generation() == model.generation() &&
                          model.windows_->size() == tensors_.size();
  if (!is_current) {
    // Layers and parts are asked for one by one: taken again until no other lane has moved them in between.
    do {
      model.windows_ = std::make_shared<const GpuWindows>(model, tensors_);
    } while (model.windows_->generation() != model.generation());
  }
  return model.windows_;
}

}  // namespace moecached::shim
