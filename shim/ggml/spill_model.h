// A model that spills from a GPU: VRAM and RAM hold a part of its experts. As gpu_model.h, but what the
// daemon gives is a model in RAM slots, which lanes resolve layer by layer (spill_runner.h); a GPU has one of
// its own.
//
// Thread: any. Memory: a part closes when the last lane or buffer that uses it goes.
#ifndef MOECACHED_SHIM_GGML_SPILL_MODEL_H_
#define MOECACHED_SHIM_GGML_SPILL_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "moecached/moecached.h"
#include "shim/ggml/gpu_model.h"
#include "shim/ggml/model_file.h"
#include "shim/ggml/tensor_source.h"

namespace moecached::shim {

class SpillModel {
 public:
  SpillModel(moecached_model* handle, ggml_backend_dev_t device) : handle_(handle), device_(device) {}
  ~SpillModel();
  SpillModel(const SpillModel&) = delete;
  SpillModel& operator=(const SpillModel&) = delete;

  moecached_model* handle() const { return handle_; }
  ggml_backend_dev_t device() const { return device_; }

 private:
  moecached_model* const handle_;
  const ggml_backend_dev_t device_;
};

class SpillExperts {
 public:
  // Opens the model on `device`. paths: all shards. The session must outlive the model. nullptr and a
  // sentence in `error` on failure.
  static std::shared_ptr<SpillExperts> open(moecached_session* session, std::vector<std::string> paths,
                                            ggml_backend_dev_t device, std::string& error);

  // As GpuExperts.
  int add_tensor(const ggml_tensor& tensor, const TensorSource& source, std::string& reason);
  bool read(std::size_t index, uint64_t offset, void* out, std::size_t bytes) const;
  std::shared_ptr<SpillModel> on(ggml_backend_dev_t device, std::string& error);

  // Valid as long as the model.
  const GpuTensor* tensor(std::size_t index) const;
  std::vector<moecached_counters> counters() const;  // of each GPU

 private:
  SpillExperts(moecached_session* session, std::vector<std::string> paths)
      : session_(session), file_(std::move(paths)) {}

  moecached_session* const session_;
  const ModelFile file_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<SpillModel>> models_;  // one a GPU
  std::vector<std::unique_ptr<GpuTensor>> tensors_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_SPILL_MODEL_H_
