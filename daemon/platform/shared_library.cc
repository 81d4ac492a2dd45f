#include "daemon/platform/shared_library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "daemon/base/check.h"
#include "daemon/platform/fd.h"

namespace moecached {
namespace {

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

// Whether others may change what lies at `path`. In a directory with the sticky bit (/tmp) they may not touch
// what is not theirs, which is enough for those above the one that is asked for.
Status check_owner(const std::string& path, const struct stat& status, bool sticky_is_enough) {
  if (status.st_uid != 0 && status.st_uid != ::geteuid()) {
    return invalid(path + " belongs to user " + std::to_string(status.st_uid) +
                   ": it must belong to root, for its code runs in the daemon");
  }
  const bool others_write = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (!others_write || (sticky_is_enough && (status.st_mode & S_ISVTX) != 0)) return ok();
  return invalid(path + " can be written by others: chmod go-w " + path);
}

Result<std::string> check_directory(const std::string& given) {
  const std::unique_ptr<char, decltype(&::free)> resolved(::realpath(given.c_str(), nullptr), &::free);
  if (resolved == nullptr) return system_fault("policy.directory " + given, errno);
  const std::string directory = resolved.get();
  for (std::string path = directory;;) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) return system_fault("look at " + path, errno);
    if (!S_ISDIR(status.st_mode)) return invalid("policy.directory " + path + " is not a directory");
    if (Status owned = check_owner(path, status, path != directory); !owned) return Fault(owned.error());
    if (path == "/") return directory;
    const std::size_t slash = path.rfind('/');
    path = slash == 0 ? "/" : path.substr(0, slash);
  }
}

}  // namespace

Result<SharedLibrary> SharedLibrary::open_trusted(const std::string& given, const std::string& name) {
  CHECK(name.find('/') == std::string::npos);
  const Result<std::string> directory = check_directory(given);
  if (!directory) return Fault(directory.error());
  const std::string path = *directory + "/" + name + ".so";
  // Not through a link: it would lead out of the directory that was checked.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd && errno == ENOENT)
    return Fault{FaultCode::kNotFound, "there is no " + path + ": put the library there, under this name"};
  if (!fd && errno == ELOOP) return invalid(path + " is a link: put the library itself there");
  if (!fd) return system_fault("open " + path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return system_fault("look at " + path, errno);
  if (!S_ISREG(status.st_mode)) return invalid(path + " is not a file");
  if (Status owned = check_owner(path, status, false); !owned) return Fault(owned.error());
  // By path: whoever can exchange the file now owns the directory. RTLD_NOW, so that what it lacks is found
  // here.
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return invalid(std::string("cannot load ") + ::dlerror());
  return SharedLibrary(handle);
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

void* SharedLibrary::symbol(const char* name) const { return ::dlsym(handle_, name); }

}  // namespace moecached
