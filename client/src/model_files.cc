#include "client/src/model_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "client/src/error.h"

namespace moecached::client {
namespace {

moecached_status changed(const std::string& path) {
  return fail(MOECACHED_E_MODEL_CHANGED, "%s has changed since it was opened: restart to use the new file",
              path.c_str());
}

}  // namespace

moecached_status ModelFiles::open(std::span<const char* const> paths, ModelFiles* out) {
  if (paths.empty() || paths.size() > MOECACHED_MAX_FILES) {
    return fail(MOECACHED_E_ARGUMENT, "a model has 1 to %u files, not %zu", unsigned{MOECACHED_MAX_FILES},
                paths.size());
  }
  out->files_.clear();
  for (const char* path : paths) {
    if (path == nullptr) return fail(MOECACHED_E_ARGUMENT, "a path is NULL");
    File file;
    file.path = path;
    file.fd = UniqueFd(::open(path, O_RDONLY | O_CLOEXEC));
    struct stat facts {};
    if (!file.fd.valid() || ::fstat(file.fd.get(), &facts) != 0) {
      return fail(MOECACHED_E_ARGUMENT, "cannot open %s: %s", path, error_name(errno));
    }
    if (!S_ISREG(facts.st_mode)) return fail(MOECACHED_E_ARGUMENT, "%s is not a regular file", path);
    file.bytes = static_cast<std::uint64_t>(facts.st_size);
    file.device = facts.st_dev;
    file.inode = facts.st_ino;
    file.modified = facts.st_mtim;
    out->files_.push_back(std::move(file));
  }
  return MOECACHED_OK;
}

std::string ModelFiles::name() const {
  const std::filesystem::path path(files_.front().path);
  // Of safetensors the folder has the name of the model, and the files in it are called alike everywhere.
  const bool is_alike = path.extension() == ".safetensors" || path.extension() == ".json";
  const std::filesystem::path folder = path.parent_path().filename();
  return is_alike && !folder.empty() ? folder : path.filename();
}

std::vector<std::uint64_t> ModelFiles::sizes() const {
  std::vector<std::uint64_t> sizes;
  for (const File& file : files_) sizes.push_back(file.bytes);
  return sizes;
}

moecached_status ModelFiles::reopen(std::vector<UniqueFd>* out) const {
  out->clear();
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    const File& file = files_[i];
    if (const auto status = check_unchanged(i)) return status;
    const std::string link = "/proc/self/fd/" + std::to_string(file.fd.get());
    UniqueFd fd(::open(link.c_str(), O_RDONLY | O_CLOEXEC));
    // Without /proc the path has to do, if it still leads to the same file.
    if (!fd.valid()) fd = UniqueFd(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat facts {};
    if (!fd.valid() || ::fstat(fd.get(), &facts) != 0) {
      return fail(MOECACHED_E_SYSTEM, "cannot open %s a second time: %s", file.path.c_str(),
                  error_name(errno));
    }
    if (facts.st_dev != file.device || facts.st_ino != file.inode) return changed(file.path);
    out->push_back(std::move(fd));
  }
  return MOECACHED_OK;
}

moecached_status ModelFiles::check_unchanged(std::uint32_t index) const {
  const File& file = files_[index];
  struct stat facts {};
  if (::fstat(file.fd.get(), &facts) != 0) {
    return fail(MOECACHED_E_IO, "cannot look at %s: %s", file.path.c_str(), error_name(errno));
  }
  const bool same = facts.st_dev == file.device && facts.st_ino == file.inode &&
                    static_cast<std::uint64_t>(facts.st_size) == file.bytes &&
                    facts.st_mtim.tv_sec == file.modified.tv_sec &&
                    facts.st_mtim.tv_nsec == file.modified.tv_nsec;
  return same ? MOECACHED_OK : changed(file.path);
}

moecached_status ModelFiles::read_expert(const LayerLayout& layer, std::uint32_t expert, std::byte* record,
                                         std::uint64_t* bytes) const {
  for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
    const moecached_shm_part& part = layer.parts[p];
    std::byte* const to = record + part.slot_offset;
    if (const auto status = read_part(layer.place(p, expert), part.expert_bytes, to)) return status;
    *bytes += part.expert_bytes;
  }
  return MOECACHED_OK;
}

moecached_status ModelFiles::read_part(const moecached_shm_extent& from, std::uint64_t bytes,
                                       std::byte* to) const {
  const File& file = files_[from.file];
  std::uint64_t offset = from.offset;
  std::uint64_t left = bytes;
  while (left > 0) {
    const ssize_t got = ::pread(file.fd.get(), to, left, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return fail(MOECACHED_E_IO, "cannot read %llu bytes at %llu of %s: %s",
                  static_cast<unsigned long long>(left), static_cast<unsigned long long>(offset),
                  file.path.c_str(), error_name(errno));
    }
    if (got == 0) return changed(file.path);  // the range was checked against the file's size: it has shrunk
    to += got;
    offset += static_cast<std::uint64_t>(got);
    left -= static_cast<std::uint64_t>(got);
  }
  // After the read, not before: a change while it ran must not go unseen.
  return check_unchanged(from.file);
}

}  // namespace moecached::client
