// The files of a model as the plugin sees them: is a host tensor what the daemon reads, and bytes of it.
//
// What it is: the checks and the reads that a model on the CPU (model.h) and one on GPUs (gpu_model.h) share.
// What it is not: a GGUF reader. Thread: any; immutable. Memory: one descriptor a shard.
#ifndef MOECACHED_SHIM_GGML_MODEL_FILE_H_
#define MOECACHED_SHIM_GGML_MODEL_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"
#include "moecached/moecached.h"
#include "shim/ggml/tensor_source.h"

namespace moecached::shim {

class ModelFile {
 public:
  // paths: all shards.
  explicit ModelFile(std::vector<std::string> paths);
  ~ModelFile();
  ModelFile(const ModelFile&) = delete;
  ModelFile& operator=(const ModelFile&) = delete;

  const std::vector<std::string>& paths() const { return paths_; }
  // "" when the host's tensor, whose bytes come from `source`, is this part; else why it is not.
  std::string mismatch(const ggml_tensor& tensor, const TensorSource& source, const moecached_part_info& part,
                       int64_t n_experts) const;
  // Reads bytes of the part, from its expert 0 on. False on an I/O error.
  bool read(const moecached_part_info& part, uint64_t offset, void* out, std::size_t bytes) const;

 private:
  const std::vector<std::string> paths_;
  std::vector<int> files_;
};

// True for one row an expert (ADD_ID), false for a matrix an expert (MUL_MAT_ID).
bool is_bias(const ggml_tensor& tensor, const moecached_part_info& part, int64_t n_experts);
// The shape of the tensor with slots in the place of its experts.
void set_slots(ggml_tensor& window, bool bias, int64_t n_slots, std::size_t slot_stride);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_MODEL_FILE_H_
