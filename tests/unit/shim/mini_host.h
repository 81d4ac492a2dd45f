// A host program in miniature: just enough of ggml to run the plugin's code without any llama.cpp library.
//
// What it is: an API table with allocation of buffers and a GGUF parser that answers from a list, a
// graph_compute that knows four operations in float, and an expert model on disk whose tensors are loaded
// through the plugin's buffer type. What it is not: ggml; that the real one agrees is what the tests on real
// libraries show.
#ifndef MOECACHED_TESTS_UNIT_SHIM_MINI_HOST_H_
#define MOECACHED_TESTS_UNIT_SHIM_MINI_HOST_H_

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "shim/ggml/backend_hook.h"
#include "tests/unit/shim/fake_client.h"

namespace moecached::testing {

// Installs the API table. gguf_init_from_file knows the tensors listed here, for any path that begins with
// "GGUF".
struct GgufEntry {
  std::string name;
  uint64_t offset;
  uint64_t bytes;
};
void install_mini_host(std::vector<GgufEntry> tensors = {});

// The permissions of the mapping that holds an address, "r--p", from /proc/self/maps; "" if none does.
std::string permissions_at(const void* address);

// A folder that goes away with the test.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// A file mapped for reading, as the default load does.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

// Runs the nodes of a graph one by one, the abort callback behind each, as ggml's CPU backend does.
// `threads` calls a CUSTOM node that often. Knows CUSTOM, GET_ROWS of int32, MUL_MAT_ID, ADD_ID and SCALE (by
// two, so that a node in between shows).
struct MiniBackend {
  ggml_abort_callback abort = nullptr;
  void* abort_data = nullptr;
  int threads = 3;
  std::vector<const ggml_tensor*> computed;  // in order, resolving nodes included
  std::vector<uint64_t> uids;                // of the graphs, on a mini GPU
  bool copies_past_the_hook = false;         // CONT calls no function that can be replaced
  ggml_backend backend = {};
  MiniBackend();
  static ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph);
};

// A graph of expert operations in host memory. Tensors live as long as the graph.
class MiniGraph {
 public:
  ggml_tensor* tensor(ggml_type type, std::vector<int64_t> shape);
  ggml_tensor* activations(std::vector<int64_t> shape, float first);
  ggml_tensor* mul_mat_id(ggml_tensor* weight, ggml_tensor* input, ggml_tensor* ids);
  ggml_tensor* add_id(ggml_tensor* input, ggml_tensor* bias, ggml_tensor* ids);
  ggml_tensor* scale(ggml_tensor* input);
  // ids of [columns, rows] as a strided view: each row is `stride` ids long, the rest is garbage.
  ggml_tensor* ids(const std::vector<std::vector<int32_t>>& rows, std::size_t stride);

  ggml_cgraph graph();
  const std::vector<ggml_tensor*>& nodes() const { return nodes_; }
  static std::vector<float> values(const ggml_tensor& tensor);

 private:
  ggml_tensor* node(ggml_op op, std::vector<int64_t> shape);
  std::deque<ggml_tensor> tensors_;
  std::deque<std::vector<char>> memory_;
  std::vector<ggml_tensor*> nodes_;
};

// A file with the expert tensors of some layers, each with gate, up, down and a bias for down, all F32.
class ExpertFile {
 public:
  static constexpr int64_t kIn = 8;
  static constexpr int64_t kOut = 6;
  ExpertFile(const std::string& path, uint32_t n_layers, uint32_t n_experts);

  // Tells the fake daemon about the file.
  void serve(uint32_t n_slots, uint64_t stream_half_bytes) const;
  // The tensor with its bytes in the file, without data.
  ggml_tensor shape_of(const std::string& name) const;
  uint64_t offset_of(const std::string& name) const { return offsets_.at(name); }
  const std::string& path() const { return path_; }
  uint32_t n_experts() const { return n_experts_; }
  static std::string name(uint32_t layer, const std::string& part) {
    return "blk." + std::to_string(layer) + ".ffn_" + part;
  }
  std::vector<GgufEntry> entries() const;

 private:
  const std::string path_;
  const uint32_t n_layers_;
  const uint32_t n_experts_;
  std::map<std::string, uint64_t> offsets_;
};

// The tensors of an ExpertFile, placed in the plugin's buffer type or in ordinary memory (stock).
class LoadedModel {
 public:
  LoadedModel(const ExpertFile& file, uint32_t n_layers, bool served);
  ~LoadedModel();
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;
  ggml_tensor* tensor(const std::string& name) { return &tensors_.at(name); }
  ggml_backend_buffer_t buffer() { return buffer_; }

 private:
  MappedFile mapping_;
  std::map<std::string, ggml_tensor> tensors_;
  ggml_backend_buffer_t buffer_ = nullptr;
};

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_MINI_HOST_H_
