// The folders in which files must lie to be served. What comes is a descriptor, not a path: the kernel says
// which path it has, and that path is walked again from the root, without leaving it and through no link; it
// must end at the same inode. So a link in a root leads nowhere, a file that was moved out or deleted is
// refused, and so is one whose path in another mount namespace is none here. A hard link in a root is a file
// in that root: who may write there may allow a file. Roots are opened once. Thread: any, after open. Needs
// openat2 (Linux 5.6).
#pragma once

#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/platform/fd.h"

namespace moecached {

class FileRoots {
 public:
  FileRoots() = default;  // every file is allowed
  // Absolute paths, separated by colons; none: every file is allowed.
  [[nodiscard]] static Result<FileRoots> open(std::string_view paths);

  [[nodiscard]] bool any() const { return !roots_.empty(); }
  // kInvalid: not beneath a root. The text names no path: whoever asks may not know it.
  [[nodiscard]] Status check(int fd) const;

 private:
  std::vector<UniqueFd> roots_;
};

}  // namespace moecached
