// Files that lie in memory (tmpfs): the kernel copies whatever is read of them, with O_DIRECT as well, which
// Linux accepts there from 6.6 on. Thread: any.
#pragma once

namespace moecached {

[[nodiscard]] bool is_memory_file(int fd) noexcept;

}  // namespace moecached
