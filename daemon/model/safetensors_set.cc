#include "daemon/model/safetensors_set.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/text.h"
#include "proto/shm/layout.h"

namespace moecached {
namespace {

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

class SetReader {
 public:
  Result<SafetensorsSet> read(std::span<const int> fds) {
    if (fds.size() > MOECACHED_MAX_FILES) {
      return Fault{FaultCode::kLimit, std::to_string(fds.size()) + " files were given, the limit is " +
                                          std::to_string(static_cast<int>(MOECACHED_MAX_FILES))};
    }
    set_.n_files = static_cast<std::uint32_t>(fds.size());
    if (auto done = check_distinct(fds); !done) return std::move(done).error();
    if (auto done = measure_headers(fds); !done) return std::move(done).error();
    for (std::uint32_t i = 0; i < fds.size(); ++i) {
      if (auto done = read_file(fds[i], i); !done) return std::move(done).error().with_context(file_text(i));
    }
    if (!config_) {
      return invalid(
          "safetensors without their config.json, which says how many experts a token uses: give it with "
          "them");
    }
    set_.config = *std::move(config_);
    if (auto done = check_names(); !done) return std::move(done).error();
    if (auto done = check_index(); !done) return std::move(done).error();
    return std::move(set_);
  }

 private:
  [[nodiscard]] std::string file_text(std::size_t index) const {
    return "file " + std::to_string(index + 1) + " of " + std::to_string(set_.n_files);
  }

  // A header takes a while to read: none is read before it is known how long all are together, nor twice.
  Status check_distinct(std::span<const int> fds) const {
    std::map<std::pair<dev_t, ino_t>, std::size_t> seen;
    for (std::size_t i = 0; i < fds.size(); ++i) {
      struct stat status {};
      if (::fstat(fds[i], &status) != 0) return system_fault(file_text(i) + ": fstat", errno);
      const auto [first, is_new] = seen.emplace(std::pair(status.st_dev, status.st_ino), i);
      if (!is_new) return invalid(file_text(i) + " is the same as file " + std::to_string(first->second + 1));
    }
    return ok();
  }

  Status measure_headers(std::span<const int> fds) {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < fds.size(); ++i) {
      auto bytes = safetensors_header_bytes(fds[i]);
      if (!bytes) return std::move(bytes).error().with_context(file_text(i));
      // A longer one is refused by name when it is read.
      all += std::min(*bytes, kSafetensorsHeaderBytesMax);
      header_bytes_.push_back(*bytes);
    }
    if (all <= kSafetensorsHeadersBytesMax) return ok();
    return Fault{FaultCode::kLimit, "the headers of all files have " + std::to_string(all) +
                                        " bytes, the limit is " +
                                        std::to_string(kSafetensorsHeadersBytesMax)};
  }

  Status read_file(int fd, std::uint32_t index) {
    if (header_bytes_[index] != 0) {
      // Not more than was measured, should somebody be writing to it.
      auto file = read_safetensors(fd, header_bytes_[index]);
      if (!file) return std::move(file).error();
      if (set_.tensors.size() + file->tensors.size() > kSafetensorsTensorsMax) {
        return Fault{FaultCode::kLimit,
                     "more than " + std::to_string(kSafetensorsTensorsMax) + " tensors in all files"};
      }
      ++n_shards_;
      for (SafetensorsTensor& tensor : file->tensors) set_.tensors.push_back({std::move(tensor), index});
      return ok();
    }
    auto found = read_safetensors_index(fd);
    if (!found) return std::move(found).error();
    if (*found) {
      if (index_) return invalid("a second index");
      index_ = **std::move(found);
      return ok();
    }
    auto config = read_hf_config(fd);
    if (!config) return std::move(config).error();
    if (config_) return invalid("a second config.json");
    config_ = *std::move(config);
    return ok();
  }

  Status check_names() {
    for (const SetTensor& tensor : set_.tensors) by_name_.push_back(&tensor);
    std::ranges::sort(by_name_, {}, name_of);
    const auto twice = std::ranges::adjacent_find(by_name_, {}, name_of);
    if (twice == by_name_.end()) return ok();
    return invalid("tensor " + in_quotes(name_of(*twice)) + " is in two files");
  }

  // The index says what the files must hold together, and which tensors share a file.
  Status check_index() const {
    if (!index_) return ok();
    if (index_->n_files != n_shards_) {
      return invalid("the index names " + std::to_string(index_->n_files) + " files, " +
                     std::to_string(n_shards_) + " safetensors files were given");
    }
    std::map<std::uint32_t, std::uint32_t> given;  // by the index's number of a file
    auto tensor = by_name_.begin();
    for (const SafetensorsIndex::Entry& entry : index_->entries) {
      if (tensor == by_name_.end() || name_of(*tensor) > entry.tensor)
        return invalid("tensor " + in_quotes(entry.tensor) + " of the index is in none of the files");
      if (name_of(*tensor) < entry.tensor) break;
      const auto [known, is_new] = given.emplace(entry.file, (*tensor)->file);
      if (known->second != (*tensor)->file)
        return invalid("tensor " + in_quotes(entry.tensor) + " is in another file than the index says");
      ++tensor;
    }
    if (tensor == by_name_.end()) return ok();
    return invalid("tensor " + in_quotes(name_of(*tensor)) + " is not in the index");
  }

  static const std::string& name_of(const SetTensor* tensor) { return tensor->tensor.name; }

  SafetensorsSet set_;
  std::vector<std::uint64_t> header_bytes_;  // by file; 0: not safetensors
  std::optional<HfConfig> config_;
  std::optional<SafetensorsIndex> index_;
  std::size_t n_shards_ = 0;
  std::vector<const SetTensor*> by_name_;
};

}  // namespace

Result<SafetensorsSet> read_safetensors_set(std::span<const int> fds) { return SetReader().read(fds); }

}  // namespace moecached
