// A model whose experts the daemon keeps in the memory of GPUs and in pinned RAM, and the window tensors that
// stand in for its expert tensors.
//
//   GpuExperts   one model file; its expert tensors as the host loaded them
//     GpuModel     the same on one GPU: one moecached_gpu_model
//       GpuWindows   the windows of one generation; immutable, so graphs on other threads keep theirs
//         GpuWindow    one tensor
//
// Thread: any. Memory: a part closes when the last plan, lane or buffer that uses it goes.
#ifndef MOECACHED_SHIM_GGML_GPU_MODEL_H_
#define MOECACHED_SHIM_GGML_GPU_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "moecached/moecached.h"
#include "shim/ggml/model_file.h"
#include "shim/ggml/tensor_source.h"

namespace moecached::shim {

class GpuModel;

// One expert tensor in the slots of one GPU.
struct GpuWindow {
  const GpuModel* model = nullptr;
  uint32_t layer = 0;
  uint32_t n_expert_used = 0;
  int64_t n_experts = 0;
  bool by_expert = false;    // its slots are experts, and are logged as such
  bool whole = false;        // its slots are experts and stay so: nothing is looked up
  uint64_t table = 0;        // CUdeviceptr of int32[n_experts]
  ggml_tensor tensor = {};   // the shape of the original, its experts replaced by the slots of the window
  bool fetches = false;      // there are scratch slots behind the window
  ggml_tensor fetched = {};  // with them
};

// An expert tensor as the host loaded it.
struct GpuTensor {
  uint32_t layer = 0;
  uint32_t part = 0;
  bool is_bias = false;
  int64_t n_experts = 0;
  moecached_part_info info = {};
  ggml_tensor shape = {};
};

// Keeps a tensor that was found in the model's layout, or finds the same one, loaded before. Its index;
// negative and a reason when its bytes are not those of the file.
int keep_tensor(std::vector<std::unique_ptr<GpuTensor>>& tensors, std::unique_ptr<GpuTensor> found,
                const ModelFile& file, const ggml_tensor& tensor, const TensorSource& source,
                std::string& reason);

class GpuWindows {
 public:
  // tensors: of the model's file, in the order of their indexes.
  GpuWindows(const GpuModel& model, const std::vector<std::unique_ptr<GpuTensor>>& tensors);
  ~GpuWindows();
  GpuWindows(const GpuWindows&) = delete;
  GpuWindows& operator=(const GpuWindows&) = delete;

  uint64_t generation() const { return generation_; }
  std::size_t size() const { return windows_.size(); }
  const GpuWindow* window(std::size_t index) const { return &windows_[index]; }

 private:
  uint64_t generation_ = 0;
  // "Foreign": it has the type of the GPU's memory, so that stock code takes its tensors for its own, and
  // frees nothing.
  ggml_backend_buffer_t buffer_ = nullptr;
  std::vector<GpuWindow> windows_;
};

class GpuExperts;

class GpuModel {
 public:
  GpuModel(moecached_gpu_model* handle, ggml_backend_dev_t device) : handle_(handle), device_(device) {}
  ~GpuModel() { moecached_gpu_model_close(handle_); }
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;

  moecached_gpu_model* handle() const { return handle_; }
  ggml_backend_dev_t device() const { return device_; }
  uint64_t generation() const { return moecached_gpu_model_generation(handle_); }

 private:
  friend class GpuExperts;
  moecached_gpu_model* const handle_;
  const ggml_backend_dev_t device_;
  std::shared_ptr<const GpuWindows> windows_;  // newest; guarded by GpuExperts
};

class GpuExperts {
 public:
  // Opens the model on `device`, so that the daemon begins to load it. paths: all shards. The session must
  // outlive the model. nullptr and a sentence in `error` on failure; *spills: because RAM is not to hold the
  // model.
  static std::shared_ptr<GpuExperts> open(moecached_session* session, std::vector<std::string> paths,
                                          ggml_backend_dev_t device, std::string& error, bool* spills);

  // The index of the host tensor with these bytes in the file; negative and a reason when the daemon does not
  // serve it. The same tensor, loaded again, has the same index.
  int add_tensor(const ggml_tensor& tensor, const TensorSource& source, std::string& reason);
  // Reads bytes of the tensor from the file. False on an I/O error.
  bool read(std::size_t index, uint64_t offset, void* out, std::size_t bytes) const;

  // The model on a GPU, opened at the first call; nullptr and a sentence in `error`.
  std::shared_ptr<GpuModel> on(ggml_backend_dev_t device, std::string& error, bool* spills = nullptr);
  // Windows of all tensors added by now, of the generation that the model has now.
  std::shared_ptr<const GpuWindows> windows(GpuModel& model);

 private:
  GpuExperts(moecached_session* session, std::vector<std::string> paths)
      : session_(session), file_(std::move(paths)) {}

  moecached_session* const session_;
  const ModelFile file_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<GpuModel>> models_;  // one a GPU
  std::vector<std::unique_ptr<GpuTensor>> tensors_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_GPU_MODEL_H_
