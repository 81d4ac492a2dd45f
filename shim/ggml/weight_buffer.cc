#include "shim/ggml/weight_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "shim/ggml/host_api.h"
#include "shim/ggml/load_hook.h"
#include "shim/ggml/log.h"
#include "shim/ggml/session.h"
#include "shim/ggml/tensor_source.h"

namespace moecached::shim {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

class WeightBuffer {
 public:
  WeightBuffer(void* base, std::size_t bytes) : base_(base), bytes_(bytes) {}
  ~WeightBuffer() { munmap(base_, bytes_); }
  WeightBuffer(const WeightBuffer&) = delete;
  WeightBuffer& operator=(const WeightBuffer&) = delete;

  void* base() const { return base_; }
  const ServedTensor* served(const void* data) const {
    const auto found = served_.find(data);
    return found == served_.end() ? nullptr : &found->second;
  }

  void set(const ggml_tensor& tensor, const void* data, std::size_t offset, std::size_t bytes);
  void get(const ggml_tensor& tensor, void* data, std::size_t offset, std::size_t bytes) const;
  void fill(const ggml_tensor& tensor, uint8_t value, std::size_t offset, std::size_t bytes);

 private:
  // Empty on success, else why the daemon does not serve the tensor.
  std::string serve(const ggml_tensor& tensor, const void* data, std::size_t bytes);
  // Puts memory behind the tensor. A served tensor gets the file's bytes, since they are about to be changed.
  void make_real(const ggml_tensor& tensor);

  void* const base_;
  const std::size_t bytes_;
  std::mutex mutex_;  // loaders may set tensors from several threads
  std::unordered_map<const void*, ServedTensor> served_;
  std::set<const void*> real_;
  std::set<std::string> refused_files_;  // the reason has been said once
};

std::string WeightBuffer::serve(const ggml_tensor& tensor, const void* data, std::size_t bytes) {
  std::optional<TensorSource> source = source_of_mapped(data);
  const bool mapped = source.has_value();
  if (!mapped) source = source_in_open_files(tensor.name, data, bytes);
  if (!source) return "its bytes were not found in any model file that this process has open";
  if (refused_files_.contains(source->path)) return "its file is not served";
  ServedTensor added;
  std::string reason;
  Session& session = Session::instance();
  if (session.on_gpu()) {
    added.gpu = session.gpu_experts(source->path);
    if (added.gpu == nullptr) added.spill = session.spill_experts(source->path);
  }
  if (added.gpu == nullptr && added.spill == nullptr) added.model = session.model(source->path);
  if (added.gpu != nullptr) {
    const int index = added.gpu->add_tensor(tensor, *source, reason);
    if (index >= 0) added.gpu_index = static_cast<std::size_t>(index);
  } else if (added.spill != nullptr) {
    const int index = added.spill->add_tensor(tensor, *source, reason);
    if (index >= 0) added.spill_index = static_cast<std::size_t>(index);
  } else if (added.model != nullptr) {
    added.window = added.model->add_tensor(tensor, *source, reason);
  } else {
    refused_files_.insert(source->path);
    return "its file is not served";
  }
  if (!reason.empty()) return reason;
  served_[tensor.data] = std::move(added);
  if (mapped)
    release_mapped(data,
                   bytes);  // pages that were read ahead with their neighbours, or without the load hook
  debug("%s is served from %s at %llu", tensor.name, source->path.c_str(),
        static_cast<unsigned long long>(source->offset));
  return "";
}

void WeightBuffer::make_real(const ggml_tensor& tensor) {
  if (!real_.insert(tensor.data).second) return;
  // The allocator aligns tensors of this type to pages, so no page has two owners.
  const std::size_t bytes = host().ggml_nbytes(&tensor);
  const std::size_t whole = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  if (mprotect(tensor.data, whole, PROT_READ | PROT_WRITE) != 0) {
    say("no memory for %s (%zu bytes): %s", tensor.name, bytes, std::strerror(errno));
    std::abort();  // ggml's setters cannot fail, and to go on would be to compute with a hole
  }
  const auto served = served_.find(tensor.data);
  if (served == served_.end()) return;
  if (!served->second.read(0, tensor.data, bytes)) {
    say("%s cannot be read from its file: %s", tensor.name, std::strerror(errno));
    std::abort();
  }
  served_.erase(served);
}

void WeightBuffer::set(const ggml_tensor& tensor, const void* data, std::size_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const bool first = !real_.contains(tensor.data) && !served_.contains(tensor.data);
  if (first) {
    const bool whole = offset == 0 && bytes == host().ggml_nbytes(&tensor);
    const std::string reason =
        whole ? serve(tensor, data, bytes) : "it was loaded in pieces, so its place in the file is not known";
    if (reason.empty()) return;
    say("%s is left out and stays in this process: %s", tensor.name, reason.c_str());
  }
  make_real(tensor);
  std::memcpy(static_cast<char*>(tensor.data) + offset, data, bytes);
}

void WeightBuffer::get(const ggml_tensor& tensor, void* data, std::size_t offset, std::size_t bytes) const {
  if (real_.contains(tensor.data)) {
    std::memcpy(data, static_cast<const char*>(tensor.data) + offset, bytes);
    return;
  }
  const ServedTensor* tensor_served = served(tensor.data);
  if (tensor_served == nullptr || !tensor_served->read(offset, data, bytes)) {
    say("%s cannot be read: zeros are returned", tensor.name);
    std::memset(data, 0, bytes);
  }
}

void WeightBuffer::fill(const ggml_tensor& tensor, uint8_t value, std::size_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  make_real(tensor);
  std::memset(static_cast<char*>(tensor.data) + offset, value, bytes);
}

WeightBuffer* of(ggml_backend_buffer_t buffer) { return static_cast<WeightBuffer*>(buffer->context); }

void buffer_free(ggml_backend_buffer_t buffer) { delete of(buffer); }
void* buffer_base(ggml_backend_buffer_t buffer) { return of(buffer)->base(); }
void buffer_memset(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, std::size_t offset,
                   std::size_t bytes) {
  of(buffer)->fill(*tensor, value, offset, bytes);
}
void buffer_set(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, std::size_t offset,
                std::size_t bytes) {
  of(buffer)->set(*tensor, data, offset, bytes);
}
void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, std::size_t offset,
                std::size_t bytes) {
  of(buffer)->get(*tensor, data, offset, bytes);
}
// Clearing comes before tensors are set; a reservation has nothing to clear.
void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

const char* type_name(ggml_backend_buffer_type_t) { return "MOECACHE"; }
std::size_t type_alignment(ggml_backend_buffer_type_t) { return page_bytes(); }
bool type_is_host(ggml_backend_buffer_type_t) { return false; }  // else stock code would read the reservation

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, std::size_t bytes) {
  // The loader allocates an empty buffer to ask what the device supports, before it maps the model: the last
  // moment to hook libraries which the host loaded after us.
  static const bool hooked = [] {
    const bool done = install_load_hook();
    if (!done) say("no object of this program imports mmap: loading will read every expert once");
    return done;
  }();
  static_cast<void>(hooked);
  const std::size_t reserved = bytes == 0 ? page_bytes() : bytes;
  void* base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    say("no %zu bytes of address space for expert tensors: %s (is `ulimit -v` set?)", reserved,
        std::strerror(errno));
    return nullptr;
  }
  ggml_backend_buffer_i table = {};
  table.free_buffer = buffer_free;
  table.get_base = buffer_base;
  table.memset_tensor = buffer_memset;
  table.set_tensor = buffer_set;
  table.get_tensor = buffer_get;
  table.clear = buffer_clear;
  return host().ggml_backend_buffer_init(type, table, new WeightBuffer(base, reserved), bytes);
}

ggml_backend_buffer_type g_type = {
    {type_name, type_alloc, type_alignment, nullptr, nullptr, type_is_host}, nullptr, nullptr};

}  // namespace

bool ServedTensor::read(uint64_t offset, void* out, std::size_t bytes) const {
  if (gpu != nullptr) return gpu->read(gpu_index, offset, out, bytes);
  if (spill != nullptr) return spill->read(spill_index, offset, out, bytes);
  return model->read(*window, offset, out, bytes);
}

ggml_backend_buffer_type_t weight_buffer_type() { return &g_type; }

void set_weight_buffer_device(ggml_backend_dev_t device) { g_type.device = device; }

bool is_in_weight_buffer(const ggml_tensor* tensor) {
  if (tensor == nullptr) return false;
  const ggml_backend_buffer* buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
  return buffer != nullptr && buffer->buft == &g_type;
}

const ServedTensor* served_tensor(const ggml_tensor* tensor) {
  ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
  return of(buffer)->served(tensor->data);
}

}  // namespace moecached::shim
