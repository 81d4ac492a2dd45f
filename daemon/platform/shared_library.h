// A shared library out of a directory that nobody but root (or the user of this process, who could change the
// process anyway) can write: its code will run here. No search and no path from outside: one directory, one
// name. Thread: any; opening reads files and runs the library's constructors. Memory: unloaded with the
// object, unless kept.
#pragma once

#include <string>
#include <utility>

#include "daemon/base/result.h"

namespace moecached {

class SharedLibrary {
 public:
  // directory/name.so. kNotFound; kInvalid: the directory, one above it or the file can be written by others,
  // or it cannot be loaded; the text says what to do. REQUIRES: no '/' in name.
  [[nodiscard]] static Result<SharedLibrary> open_trusted(const std::string& directory,
                                                          const std::string& name);
  SharedLibrary(SharedLibrary&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  SharedLibrary& operator=(SharedLibrary&&) = delete;
  ~SharedLibrary();

  [[nodiscard]] void* symbol(const char* name) const;  // nullptr: it has none
  void keep() { handle_ = nullptr; }                   // until the process ends

 private:
  explicit SharedLibrary(void* handle) : handle_(handle) {}
  void* handle_;
};

}  // namespace moecached
