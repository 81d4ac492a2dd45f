#include "tests/unit/shim/mini_host.h"

#include "tests/unit/shim/fake_backend_copy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "shim/ggml/host_api.h"
#include "shim/ggml/weight_buffer.h"
#include "tests/unit/shim/mini_gpu.h"

namespace moecached::testing {
namespace {

std::vector<GgufEntry> g_gguf;
int g_gguf_context = 0;

std::size_t bytes_of(const ggml_tensor& tensor) {
  std::size_t bytes = 4;
  for (int i = 0; i < GGML_MAX_DIMS; ++i) bytes += static_cast<std::size_t>(tensor.ne[i] - 1) * tensor.nb[i];
  return bytes;
}

ggml_tensor shaped(ggml_type type, const std::vector<int64_t>& shape) {
  ggml_tensor tensor = {};
  tensor.type = type;
  for (std::size_t i = 0; i < GGML_MAX_DIMS; ++i) tensor.ne[i] = i < shape.size() ? shape[i] : 1;
  tensor.nb[0] = 4;
  for (int i = 1; i < GGML_MAX_DIMS; ++i)
    tensor.nb[i] = tensor.nb[i - 1] * static_cast<std::size_t>(tensor.ne[i - 1]);
  return tensor;
}

template <typename T>
T& element(const ggml_tensor& tensor, int64_t i0, int64_t i1 = 0, int64_t i2 = 0) {
  return *reinterpret_cast<T*>(static_cast<char*>(tensor.data) + static_cast<std::size_t>(i0) * tensor.nb[0] +
                               static_cast<std::size_t>(i1) * tensor.nb[1] +
                               static_cast<std::size_t>(i2) * tensor.nb[2]);
}

void multiply(ggml_tensor& node) {
  const ggml_tensor& weight = *node.src[0];
  const ggml_tensor& input = *node.src[1];
  const ggml_tensor& ids = *node.src[2];
  for (int64_t row = 0; row < ids.ne[1]; ++row) {
    for (int64_t column = 0; column < ids.ne[0]; ++column) {
      const int32_t id = element<int32_t>(ids, column, row);
      if (id < 0 || id >= weight.ne[2]) throw std::out_of_range("an id outside of the weights");
      for (int64_t out = 0; out < node.ne[0]; ++out) {
        float sum = 0;
        for (int64_t in = 0; in < weight.ne[0]; ++in) {
          sum += element<float>(weight, in, out, id) * element<float>(input, in, column % input.ne[1], row);
        }
        element<float>(node, out, column, row) = sum;
      }
    }
  }
}

void add(ggml_tensor& node) {
  const ggml_tensor& ids = *node.src[2];
  for (int64_t row = 0; row < ids.ne[1]; ++row) {
    for (int64_t column = 0; column < ids.ne[0]; ++column) {
      const int32_t id = element<int32_t>(ids, column, row);
      if (id < 0 || id >= node.src[1]->ne[1]) throw std::out_of_range("an id outside of the biases");
      for (int64_t i = 0; i < node.ne[0]; ++i) {
        element<float>(node, i, column, row) =
            element<float>(*node.src[0], i, column, row) + element<float>(*node.src[1], i, id);
      }
    }
  }
}

void get_rows(ggml_tensor& node) {
  const ggml_tensor& ids = *node.src[1];
  for (int64_t row = 0; row < ids.ne[1]; ++row) {
    for (int64_t column = 0; column < ids.ne[0]; ++column) {
      const int32_t id = element<int32_t>(ids, column, row);
      if (id < 0 || id >= node.src[0]->ne[1]) throw std::out_of_range("an id outside of the table");
      element<int32_t>(node, 0, column, row) = element<int32_t>(*node.src[0], 0, id, row);
    }
  }
}

void run_custom(ggml_tensor& node, int threads) {
  ggml_custom_op_params params;
  std::memcpy(&params, node.op_params, sizeof params);
  for (int thread = 0; thread < threads; ++thread) params.fun(&node, thread, threads, params.userdata);
}

}  // namespace

void install_mini_host(std::vector<GgufEntry> tensors) {
  g_gguf = std::move(tensors);
  shim::HostApi api;
  api.ggml_nbytes = [](const ggml_tensor* tensor) { return bytes_of(*tensor); };
  api.ggml_backend_buffer_init = [](ggml_backend_buffer_type_t type, ggml_backend_buffer_i table,
                                    void* context, std::size_t bytes) {
    return new ggml_backend_buffer{table, type, context, bytes, GGML_BACKEND_BUFFER_USAGE_ANY};
  };
  api.ggml_backend_buffer_free = [](ggml_backend_buffer_t buffer) {
    if (buffer->iface.free_buffer != nullptr) buffer->iface.free_buffer(buffer);
    delete buffer;
  };
  api.ggml_backend_buft_alloc_buffer = [](ggml_backend_buffer_type_t type, std::size_t bytes) {
    return type->iface.alloc_buffer(type, bytes);
  };
  api.ggml_backend_reg_by_name = [](const char* name) {
    return std::strcmp(name, "CUDA") == 0 ? mini_gpu_registry() : nullptr;
  };
  api.gguf_init_from_file = [](const char*, gguf_init_params) {
    return reinterpret_cast<gguf_context*>(&g_gguf_context);
  };
  api.gguf_free = [](gguf_context*) {};
  api.gguf_get_data_offset = [](const gguf_context*) -> std::size_t { return 0; };
  api.gguf_get_n_tensors = [](const gguf_context*) { return static_cast<int64_t>(g_gguf.size()); };
  api.gguf_get_tensor_name = [](const gguf_context*, int64_t i) {
    return g_gguf[static_cast<std::size_t>(i)].name.c_str();
  };
  api.gguf_get_tensor_offset = [](const gguf_context*, int64_t i) -> std::size_t {
    return g_gguf[static_cast<std::size_t>(i)].offset;
  };
  api.gguf_get_tensor_size = [](const gguf_context*, int64_t i) -> std::size_t {
    return g_gguf[static_cast<std::size_t>(i)].bytes;
  };
  shim::set_host_api(api);
}

std::string permissions_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    char permissions[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, permissions) != 3) continue;
    const auto at = reinterpret_cast<unsigned long>(address);
    if (at >= begin && at < end) return permissions;
  }
  return "";
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "moecached-shim-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() { std::filesystem::remove_all(path_); }

MappedFile::MappedFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (fd < 0 || fstat(fd, &status) != 0) throw std::runtime_error("cannot open " + path);
  size_ = static_cast<std::size_t>(status.st_size);
  data_ = static_cast<const char*>(mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0));
  close(fd);
}

MappedFile::~MappedFile() { munmap(const_cast<char*>(data_), size_); }

MiniBackend::MiniBackend() { backend.context = this; }

ggml_status MiniBackend::compute(ggml_backend_t backend, ggml_cgraph* graph) {
  auto* self = static_cast<MiniBackend*>(backend->context);
  for (int i = 0; i < graph->n_nodes; ++i) {
    ggml_tensor& node = *graph->nodes[i];
    if ((node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    self->computed.push_back(&node);
    switch (node.op) {
      case GGML_OP_CUSTOM:
        run_custom(node, self->threads);
        break;
      case GGML_OP_GET_ROWS:
        get_rows(node);
        break;
      case GGML_OP_CONT:  // as ggml-cuda does it
        if (self->copies_past_the_hook) {
          std::memcpy(node.data, node.src[0]->data, bytes_of(node));
          break;
        }
        FakeBackendCopy::hooked().copy(node.data, node.src[0]->data, bytes_of(node), self);
        break;
      case GGML_OP_MUL_MAT_ID:
        multiply(node);
        break;
      case GGML_OP_ADD_ID:
        add(node);
        break;
      case GGML_OP_SCALE:
        for (int64_t row = 0; row < node.ne[2]; ++row) {
          for (int64_t column = 0; column < node.ne[1]; ++column) {
            for (int64_t j = 0; j < node.ne[0]; ++j) {
              element<float>(node, j, column, row) = 2 * element<float>(*node.src[0], j, column, row);
            }
          }
        }
        break;
      default:
        return GGML_STATUS_FAILED;
    }
    if (self->abort != nullptr && self->abort(self->abort_data)) return GGML_STATUS_ABORTED;
  }
  return GGML_STATUS_SUCCESS;
}

ggml_tensor* MiniGraph::tensor(ggml_type type, std::vector<int64_t> shape) {
  tensors_.push_back(shaped(type, shape));
  ggml_tensor& added = tensors_.back();
  memory_.emplace_back(bytes_of(added));
  added.data = memory_.back().data();
  return &added;
}

ggml_tensor* MiniGraph::activations(std::vector<int64_t> shape, float first) {
  ggml_tensor* added = tensor(GGML_TYPE_F32, shape);
  auto* at = static_cast<float*>(added->data);
  for (std::size_t i = 0; i < bytes_of(*added) / 4; ++i) at[i] = first + static_cast<float>(i % 13) * 0.37f;
  return added;
}

ggml_tensor* MiniGraph::node(ggml_op op, std::vector<int64_t> shape) {
  ggml_tensor* added = tensor(GGML_TYPE_F32, shape);
  added->op = op;
  added->flags = GGML_TENSOR_FLAG_COMPUTE;
  nodes_.push_back(added);
  return added;
}

ggml_tensor* MiniGraph::mul_mat_id(ggml_tensor* weight, ggml_tensor* input, ggml_tensor* ids) {
  ggml_tensor* added = node(GGML_OP_MUL_MAT_ID, {weight->ne[1], ids->ne[0], ids->ne[1]});
  added->src[0] = weight;
  added->src[1] = input;
  added->src[2] = ids;
  return added;
}

ggml_tensor* MiniGraph::add_id(ggml_tensor* input, ggml_tensor* bias, ggml_tensor* ids) {
  ggml_tensor* added = node(GGML_OP_ADD_ID, {input->ne[0], input->ne[1], input->ne[2]});
  added->src[0] = input;
  added->src[1] = bias;
  added->src[2] = ids;
  return added;
}

ggml_tensor* MiniGraph::scale(ggml_tensor* input) {
  ggml_tensor* added = node(GGML_OP_SCALE, {input->ne[0], input->ne[1], input->ne[2]});
  added->src[0] = input;
  return added;
}

ggml_tensor* MiniGraph::ids(const std::vector<std::vector<int32_t>>& rows, std::size_t stride) {
  ggml_tensor* whole =
      tensor(GGML_TYPE_I32, {static_cast<int64_t>(stride), static_cast<int64_t>(rows.size())});
  std::fill_n(static_cast<int32_t*>(whole->data), stride * rows.size(), 1 << 30);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::size_t column = 0; column < rows[row].size(); ++column) {
      element<int32_t>(*whole, static_cast<int64_t>(column), static_cast<int64_t>(row)) = rows[row][column];
    }
  }
  tensors_.push_back(*whole);
  tensors_.back().ne[0] = static_cast<int64_t>(rows[0].size());
  return &tensors_.back();
}

ggml_cgraph MiniGraph::graph() {
  ggml_cgraph graph = {};
  graph.nodes = nodes_.data();
  graph.n_nodes = graph.size = static_cast<int>(nodes_.size());
  graph.uid = 77;
  return graph;
}

std::vector<float> MiniGraph::values(const ggml_tensor& tensor) {
  const auto* at = static_cast<const float*>(tensor.data);
  return {at, at + bytes_of(tensor) / 4};
}

ExpertFile::ExpertFile(const std::string& path, uint32_t n_layers, uint32_t n_experts)
    : path_(path), n_layers_(n_layers), n_experts_(n_experts) {
  std::ofstream file(path, std::ios::binary);
  file << "GGUF";
  uint64_t at = 4096;  // tensors begin where no other file has them by chance
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    for (const char* part : {"gate_exps.weight", "up_exps.weight", "down_exps.weight", "down_exps.bias"}) {
      const std::string tensor_name = name(layer, part);
      offsets_[tensor_name] = at;
      const ggml_tensor shape = shape_of(tensor_name);
      std::vector<float> values(bytes_of(shape) / 4);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((at + i * 7919) % 1013) / 1013.0f - 0.5f;
      }
      file.seekp(static_cast<std::streamoff>(at));
      file.write(reinterpret_cast<const char*>(values.data()),
                 static_cast<std::streamsize>(values.size() * 4));
      at += (values.size() * 4 + 31) / 32 * 32;
    }
  }
}

ggml_tensor ExpertFile::shape_of(const std::string& name) const {
  const int64_t n = n_experts_;
  const bool is_down = name.find("down") != std::string::npos;
  ggml_tensor shape = name.ends_with("bias") ? shaped(GGML_TYPE_F32, {kIn, n})
                      : is_down              ? shaped(GGML_TYPE_F32, {kOut, kIn, n})
                                             : shaped(GGML_TYPE_F32, {kIn, kOut, n});
  std::strncpy(shape.name, name.c_str(), sizeof shape.name - 1);
  return shape;
}

std::vector<GgufEntry> ExpertFile::entries() const {
  std::vector<GgufEntry> list;
  for (const auto& [name, offset] : offsets_) list.push_back({name, offset, bytes_of(shape_of(name))});
  return list;
}

void ExpertFile::serve(uint32_t n_slots, uint64_t stream_half_bytes) const {
  FakeDaemon& daemon = fake_daemon();
  daemon.stream_half_bytes = stream_half_bytes;
  daemon.layers.clear();
  for (uint32_t layer = 0; layer < n_layers_; ++layer) {
    FakeLayer added{layer, n_experts_, n_slots, {}};
    uint32_t kind = 0;
    for (const char* part : {"gate_exps.weight", "up_exps.weight", "down_exps.weight", "down_exps.bias"}) {
      const std::string tensor_name = name(layer, part);
      const ggml_tensor shape = shape_of(tensor_name);
      const bool bias = tensor_name.ends_with("bias");
      added.parts.push_back({tensor_name, kind++, GGML_TYPE_F32, static_cast<uint64_t>(shape.ne[0]),
                             bias ? 1u : static_cast<uint64_t>(shape.ne[1]), bias ? shape.nb[1] : shape.nb[2],
                             offsets_.at(tensor_name)});
    }
    daemon.layers.push_back(std::move(added));
  }
}

LoadedModel::LoadedModel(const ExpertFile& file, uint32_t n_layers, bool served) : mapping_(file.path()) {
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    for (const char* part : {"gate_exps.weight", "up_exps.weight", "down_exps.weight", "down_exps.bias"}) {
      const std::string name = ExpertFile::name(layer, part);
      tensors_[name] = file.shape_of(name);
      tensors_[name].data = const_cast<char*>(mapping_.data()) + file.offset_of(name);
    }
  }
  if (!served) return;
  ggml_backend_buffer_type_t type = shim::weight_buffer_type();
  const std::size_t page = type->iface.get_alignment(type);
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += (bytes_of(tensor) + page - 1) / page * page;
  buffer_ = type->iface.alloc_buffer(type, bytes);
  auto* at = static_cast<char*>(buffer_->iface.get_base(buffer_));
  for (auto& [name, tensor] : tensors_) {
    const void* data = tensor.data;
    tensor.data = at;
    tensor.buffer = buffer_;
    at += (bytes_of(tensor) + page - 1) / page * page;
    buffer_->iface.set_tensor(buffer_, &tensor, data, 0, bytes_of(tensor));
  }
}

LoadedModel::~LoadedModel() {
  if (buffer_ == nullptr) return;
  buffer_->iface.free_buffer(buffer_);
  delete buffer_;
}

}  // namespace moecached::testing
