#include "daemon/platform/memory_file.h"

#include <linux/magic.h>
#include <sys/vfs.h>

namespace moecached {

bool is_memory_file(int fd) noexcept {
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0) return false;
  return status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC || status.f_type == HUGETLBFS_MAGIC;
}

}  // namespace moecached
