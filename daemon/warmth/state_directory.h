// Where hot lists lie between two starts of the daemon: one file a model, hot-<key>.csv, replaced as a whole
// (written beside, then renamed), the oldest removed when there are too many. Not a lock: of two daemons that
// share a directory the one that writes last is remembered. Thread: any one at a time, not the core loop.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/warmth/use_list.h"

namespace moecached {

class StateDirectory {
 public:
  static constexpr std::size_t kFilesMax = 64;

  // Made if it is not there, and one above it. Mode 0700: use tells something of the text.
  static Result<StateDirectory> open(const std::string& path);

  // Nothing, when there is none. A file that is damaged, cut off, or of another model is a fault, which says
  // what becomes of it.
  [[nodiscard]] Result<std::vector<UseList>> load(std::uint64_t key) const;
  Status save(std::uint64_t key, const std::string& model, const std::vector<UseList>& lists);
  [[nodiscard]] std::string path_of(std::uint64_t key) const;

 private:
  explicit StateDirectory(std::string path) : path_(std::move(path)) {}
  void remove_oldest() const;
  std::string path_;
};

}  // namespace moecached
