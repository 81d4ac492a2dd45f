// The files of a model as this process opened them: what it falls back to when the daemon cannot serve. Every
// read is followed by a look at the file's identity, so that bytes of a file changed since it was opened are
// never used. Thread: any; reads share no file position. Memory: owns its descriptors.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/resources.h"
#include "client/src/segments.h"

namespace moecached::client {

class ModelFiles {
 public:
  // MOECACHED_E_ARGUMENT: a path cannot be opened for reading or is not a regular file.
  [[nodiscard]] static moecached_status open(std::span<const char* const> paths, ModelFiles* out);

  [[nodiscard]] std::vector<std::uint64_t> sizes() const;
  [[nodiscard]] const char* first_path() const { return files_.front().path.c_str(); }
  // For people: what the daemon is to call the model.
  [[nodiscard]] std::string name() const;

  // Second descriptors, for the daemon. Not duplicates: those would share their flags with ours, and a daemon
  // that turns on O_DIRECT for itself would break this process's unaligned reads.
  [[nodiscard]] moecached_status reopen(std::vector<UniqueFd>* out) const;

  // MOECACHED_E_MODEL_CHANGED: size, time of change or inode differ from those at open().
  [[nodiscard]] moecached_status check_unchanged(std::uint32_t file) const;

  // All parts of one expert, each at its slot_offset of `record`. *bytes grows by what was read.
  [[nodiscard]] moecached_status read_expert(const LayerLayout& layer, std::uint32_t expert,
                                             std::byte* record, std::uint64_t* bytes) const;
  // One part of one expert: `bytes` from its place.
  [[nodiscard]] moecached_status read_part(const moecached_shm_extent& from, std::uint64_t bytes,
                                           std::byte* to) const;

 private:
  struct File {
    std::string path;
    UniqueFd fd;
    std::uint64_t bytes = 0;
    dev_t device = 0;
    ino_t inode = 0;
    timespec modified{};
  };

  std::vector<File> files_;
};

}  // namespace moecached::client
