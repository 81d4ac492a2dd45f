#include "shim/ggml/tensor_source.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "shim/ggml/gguf_index.h"

namespace moecached::shim {
namespace {

constexpr std::string_view kDeleted = " (deleted)";

std::optional<uint64_t> parse_number(std::string_view text, int base) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Takes the next blank-separated field off the front.
std::string_view next_field(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  const std::string_view field = line.substr(0, line.find(' '));
  line.remove_prefix(field.size());
  return field;
}

// The kernel writes a newline inside a path as \012.
std::string unescape_path(std::string_view text) {
  std::string path;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 4) == "\\012") {
      path += '\n';
      i += 3;
    } else {
      path += text[i];
    }
  }
  return path;
}

// Pages spread over the tensor, its first and last among them. Bytes that agree in all of them and in name,
// size and type but come from another file would have to be made on purpose.
bool sample_equals(int fd, uint64_t offset, const char* data, std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kSamples = 16;
  char page[kPage];
  const std::size_t last = bytes > kPage ? bytes - kPage : 0;
  for (std::size_t i = 0; i < kSamples; ++i) {
    const std::size_t at = last / (kSamples - 1) * i + (i + 1 == kSamples ? last % (kSamples - 1) : 0);
    const std::size_t length = std::min(kPage, bytes - at);
    if (pread(fd, page, length, static_cast<off_t>(offset + at)) != static_cast<ssize_t>(length))
      return false;
    if (std::memcmp(page, data + at, length) != 0) return false;
  }
  return true;
}

}  // namespace

std::optional<TensorSource> source_in_maps(std::string_view maps, uintptr_t address) {
  while (!maps.empty()) {
    std::string_view line = maps.substr(0, maps.find('\n'));
    maps.remove_prefix(std::min(line.size() + 1, maps.size()));
    const std::string_view range = next_field(line);
    const std::size_t dash = range.find('-');
    if (dash == std::string_view::npos) continue;
    const auto begin = parse_number(range.substr(0, dash), 16);
    const auto end = parse_number(range.substr(dash + 1), 16);
    if (!begin || !end || address < *begin || address >= *end) continue;
    next_field(line);  // permissions
    const auto offset = parse_number(next_field(line), 16);
    next_field(line);  // device
    const auto inode = parse_number(next_field(line), 10);
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    if (!offset || !inode || *inode == 0 || line.empty() || line.front() != '/') return std::nullopt;
    if (line.ends_with(kDeleted)) return std::nullopt;
    return TensorSource{unescape_path(line), *offset + (address - *begin)};
  }
  return std::nullopt;
}

std::optional<TensorSource> source_of_mapped(const void* data) {
  std::ifstream file("/proc/self/maps");
  const std::string maps{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return source_in_maps(maps, reinterpret_cast<uintptr_t>(data));
}

std::optional<TensorSource> source_in_open_files(std::string_view name, const void* data, std::size_t bytes) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return std::nullopt;
  while (const dirent* item = readdir(folder.get())) {
    const auto fd = parse_number(item->d_name, 10);
    if (!fd) continue;
    const std::shared_ptr<const GgufIndex> index = gguf_index_of(static_cast<int>(*fd));
    const GgufIndex::Entry* entry = index == nullptr ? nullptr : index->find(name);
    if (entry == nullptr || entry->bytes != bytes) continue;
    const std::string link = std::string("/proc/self/fd/") + item->d_name;
    char path[4096];
    const ssize_t length = readlink(link.c_str(), path, sizeof path);
    if (length <= 0 || path[0] != '/') continue;
    // A descriptor of our own: the loader's may be O_DIRECT, which takes aligned reads only.
    const int own = open(link.c_str(), O_RDONLY | O_CLOEXEC);
    if (own < 0) continue;
    const bool equal = sample_equals(own, entry->offset, static_cast<const char*>(data), bytes);
    close(own);
    if (equal) return TensorSource{std::string(path, static_cast<std::size_t>(length)), entry->offset};
  }
  return std::nullopt;
}

std::vector<std::string> shard_paths(const std::string& path) {
  // "<prefix>-00001-of-00003.gguf": five digits each, as llama.cpp writes them.
  constexpr std::string_view kTail = ".gguf";
  constexpr std::size_t kDigits = 5;
  constexpr std::size_t kSuffix = 1 + kDigits + 4 + kDigits + kTail.size();  // "-NNNNN-of-NNNNN.gguf"
  if (path.size() <= kSuffix || !path.ends_with(kTail)) return {path};
  const std::string_view suffix = std::string_view(path).substr(path.size() - kSuffix);
  const auto number = parse_number(suffix.substr(1, kDigits), 10);
  const auto count = parse_number(suffix.substr(1 + kDigits + 4, kDigits), 10);
  if (suffix[0] != '-' || suffix.substr(1 + kDigits, 4) != "-of-" || !number || !count || *count == 0 ||
      *number == 0 || *number > *count) {
    return {path};
  }
  std::vector<std::string> paths;
  const std::string prefix = path.substr(0, path.size() - kSuffix);
  for (uint64_t shard = 1; shard <= *count; ++shard) {
    char tail[kSuffix + 1];
    std::snprintf(tail, sizeof tail, "-%05u-of-%05u.gguf", static_cast<unsigned>(shard % 100000),
                  static_cast<unsigned>(*count % 100000));
    paths.push_back(prefix + tail);
  }
  return paths;
}

}  // namespace moecached::shim
