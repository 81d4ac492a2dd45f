// A model whose experts the daemon keeps, and the window tensors that stand in for its expert tensors.
//
// What it is: the plugin's side of one moecached_model, shared by the buffers that hold its tensors and the
// lanes that compute with it; it closes when the last of them goes. Keyed by the file, never by tensor names:
// a draft model has the same. Thread: any; refresh() only while no graph runs.
#ifndef MOECACHED_SHIM_GGML_MODEL_H_
#define MOECACHED_SHIM_GGML_MODEL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ggml.h"
#include "moecached/moecached.h"
#include "shim/ggml/model_file.h"
#include "shim/ggml/tensor_source.h"

namespace moecached::shim {

// One expert tensor served from the daemon's slots.
struct WindowTensor {
  uint32_t layer = 0;
  uint32_t part = 0;
  bool is_bias = false;  // one row an expert: ADD_ID. Else a matrix an expert: MUL_MAT_ID
  moecached_part_info info = {};
  ggml_tensor window = {};  // the shape of the original, its experts replaced by the slots of the window
};

class Model : public std::enable_shared_from_this<Model> {
 public:
  // paths: all shards. The session must outlive the model. nullptr and a sentence in `error` on failure.
  static std::shared_ptr<Model> open(moecached_session* session, std::vector<std::string> paths,
                                     std::string& error);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // The window tensor for a host tensor with these bytes in the file; nullptr and a reason when the daemon
  // does not serve it.
  const WindowTensor* add_tensor(const ggml_tensor& tensor, const TensorSource& source, std::string& reason);
  // Reads bytes of the tensor from the file. False on an I/O error.
  bool read(const WindowTensor& tensor, uint64_t offset, void* out, std::size_t bytes) const;

  // The windows may have moved: takes their addresses again.
  void refresh();

  moecached_model* handle() const { return model_; }
  uint32_t experts_of(uint32_t layer) const { return layers_[layer].n_experts; }
  moecached_counters counters() const;

 private:
  Model(moecached_model* model, std::vector<std::string> paths);
  void take_layers();
  void place(WindowTensor& tensor) const;

  moecached_model* const model_;
  const ModelFile file_;
  std::vector<moecached_layer_info> layers_;
  uint64_t generation_ = 0;
  std::mutex mutex_;  // loading
  std::vector<std::unique_ptr<WindowTensor>> tensors_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_MODEL_H_
