#include "shim/ggml/gguf_index.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <compare>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "shim/ggml/host_api.h"

namespace moecached::shim {
namespace {

// The same inode with another size or time is another file as far as offsets are concerned.
struct FileIdentity {
  dev_t device;
  ino_t inode;
  off_t bytes;
  int64_t modified_s;
  int64_t modified_ns;
  auto operator<=>(const FileIdentity&) const = default;
};

struct IndexCache {
  std::mutex mutex;
  std::map<FileIdentity, std::shared_ptr<const GgufIndex>> indexes;
};

IndexCache& cache() {
  static IndexCache* instance =
      new IndexCache;  // never destroyed: the host may unmap files during its own exit
  return *instance;
}

std::shared_ptr<const GgufIndex> parse(const std::string& path) {
  gguf_init_params params = {};
  params.no_alloc = true;
  gguf_context* file = host().gguf_init_from_file(path.c_str(), params);
  if (file == nullptr) return nullptr;
  std::map<std::string, GgufIndex::Entry, std::less<>> entries;
  const uint64_t data = host().gguf_get_data_offset(file);
  const int64_t n_tensors = host().gguf_get_n_tensors(file);
  for (int64_t i = 0; i < n_tensors; ++i) {
    entries[host().gguf_get_tensor_name(file, i)] = {data + host().gguf_get_tensor_offset(file, i),
                                                     host().gguf_get_tensor_size(file, i)};
  }
  host().gguf_free(file);
  return std::make_shared<const GgufIndex>(std::move(entries));
}

// A descriptor opened with O_DIRECT or write-only cannot be read by the byte, so the magic is read through
// one of our own.
bool has_gguf_magic(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char magic[4] = {};
  const bool is_gguf =
      pread(fd, magic, sizeof magic, 0) == sizeof magic && std::memcmp(magic, "GGUF", 4) == 0;
  close(fd);
  return is_gguf;
}

}  // namespace

bool is_expert_tensor(std::string_view name) { return name.find("_exps.") != std::string_view::npos; }

const GgufIndex::Entry* GgufIndex::find(std::string_view tensor) const {
  const auto found = entries_.find(tensor);
  return found == entries_.end() ? nullptr : &found->second;
}

bool GgufIndex::has_experts() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return is_expert_tensor(entry.first); });
}

std::vector<ByteRange> GgufIndex::ranges_without_experts(uint64_t file_bytes) const {
  std::vector<ByteRange> experts;
  for (const auto& [name, entry] : entries_) {
    if (is_expert_tensor(name)) experts.push_back({entry.offset, entry.offset + entry.bytes});
  }
  std::sort(experts.begin(), experts.end(),
            [](const ByteRange& left, const ByteRange& right) { return left.begin < right.begin; });
  std::vector<ByteRange> rest;
  uint64_t at = 0;
  for (const ByteRange& expert : experts) {
    if (expert.begin >= file_bytes) break;
    if (expert.begin > at) rest.push_back({at, expert.begin});
    at = std::max(at, expert.end);
  }
  if (at < file_bytes) rest.push_back({at, file_bytes});
  return rest;
}

std::shared_ptr<const GgufIndex> gguf_index_of(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return nullptr;
  const FileIdentity identity = {status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
                                 status.st_mtim.tv_nsec};
  IndexCache& indexes = cache();
  const std::lock_guard lock(indexes.mutex);
  if (const auto found = indexes.indexes.find(identity); found != indexes.indexes.end()) return found->second;
  // Through the descriptor, not the name: the name may lead to another file by now.
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  std::shared_ptr<const GgufIndex> index = has_gguf_magic(path) ? parse(path) : nullptr;
  // Other files are not kept: there may be any number of them, and telling them apart costs one read.
  if (index != nullptr) indexes.indexes[identity] = index;
  return index;
}

}  // namespace moecached::shim
