#include "daemon/warmth/state_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "daemon/platform/fd.h"
#include "daemon/warmth/hot_list.h"
#include "daemon/warmth/prewarm_source.h"

namespace moecached {

Result<StateDirectory> StateDirectory::open(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash != std::string::npos && slash > 0) ::mkdir(path.substr(0, slash).c_str(), 0700);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return system_fault("create the state directory " + path, errno);
  if (::access(path.c_str(), W_OK | X_OK) != 0)
    return system_fault("write into the state directory " + path, errno);
  return StateDirectory(path);
}

std::string StateDirectory::path_of(std::uint64_t key) const {
  char name[32];
  std::snprintf(name, sizeof name, "/hot-%016llx.csv", static_cast<unsigned long long>(key));
  return path_ + name;
}

Result<std::vector<UseList>> StateDirectory::load(std::uint64_t key) const {
  const std::string path = path_of(key);
  auto text = read_small_file(path, kHotListBytesMax);
  if (!text && text.error().code == FaultCode::kNotFound) return std::vector<UseList>();
  if (!text) return std::move(text).error().with_context(path);
  auto lists = parse_hot_lists(*text);
  if (!lists) return std::move(lists).error().with_context(path);
  if (!lists->sealed)
    return Fault{FaultCode::kInvalid, path + ": its last line is missing, the file was cut off"};
  if (lists->key != key) return Fault{FaultCode::kInvalid, path + ": it is another model's"};
  return std::move(lists->lists);
}

Status StateDirectory::save(std::uint64_t key, const std::string& model, const std::vector<UseList>& lists) {
  const std::string path = path_of(key), beside = path + ".new";
  const std::string text = print_hot_lists(key, model, lists);
  ::unlink(beside.c_str());  // of a write that was cut off
  UniqueFd fd(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return system_fault("open " + beside, errno);
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t put = ::write(fd.get(), text.data() + at, text.size() - at);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const Fault fault = system_fault("write " + beside, errno);
      ::unlink(beside.c_str());
      return fault;
    }
    at += static_cast<std::size_t>(put);
  }
  // Or a power cut leaves the new name with nothing behind it.
  if (::fsync(fd.get()) != 0 || ::rename(beside.c_str(), path.c_str()) != 0) {
    const Fault fault = system_fault("replace " + path, errno);
    ::unlink(beside.c_str());
    return fault;
  }
  remove_oldest();
  return ok();
}

void StateDirectory::remove_oldest() const {
  namespace fs = std::filesystem;
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.starts_with("hot-") && name.ends_with(".csv"))
      files.emplace_back(it->last_write_time(error), it->path());
  }
  std::ranges::sort(files);
  for (std::size_t i = 0; i + kFilesMax < files.size(); ++i) fs::remove(files[i].second, error);
}

}  // namespace moecached
