// What the fuzz targets share. A target is one file, NAME_fuzz.cc, with LLVMFuzzerTestOneInput: it gives the
// bytes to the code under test and CHECKs what the code promises. Built twice: with clang's libFuzzer and
// sanitizers, and with replay_main.cc by any compiler, which runs the files of a corpus.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "daemon/base/check.h"
#include "daemon/base/result.h"
#include "daemon/base/text.h"
#include "daemon/platform/fd.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace moecached::fuzz {

// Hands out values from the front of the input; zeros when nothing is left.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : rest_(std::as_bytes(bytes)) {}
  [[nodiscard]] bool empty() const { return rest_.empty(); }
  template <typename T>
  T take() {
    T value{};
    const auto some = bytes(sizeof value);
    std::memcpy(&value, some.data(), some.size());
    return value;
  }
  // At most n.
  std::span<const std::byte> bytes(std::size_t n) {
    const auto some = rest_.first(std::min(n, rest_.size()));
    rest_ = rest_.subspan(some.size());
    return some;
  }
  std::string_view text() {  // all that is left
    const auto all = bytes(rest_.size());
    return {reinterpret_cast<const char*>(all.data()), all.size()};
  }

 private:
  std::span<const std::byte> rest_;
};

// A file of `file_bytes`, zeros behind the given ones.
inline UniqueFd file_of(std::span<const std::byte> bytes, std::uint64_t file_bytes) {
  UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  CHECK(fd);
  if (!bytes.empty())
    CHECK(::pwrite(fd.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(::ftruncate(fd.get(), static_cast<off_t>(file_bytes)) == 0);
  return fd;
}
inline UniqueFd file_of(std::span<const std::byte> bytes) { return file_of(bytes, bytes.size()); }
inline std::string path_of(const UniqueFd& fd) { return "/proc/self/fd/" + std::to_string(fd.get()); }

// A sentence that a log, a terminal and a gRPC string can take.
inline void check_text(std::string_view text) { CHECK(for_people(text) == text); }
inline void check_fault(const Fault& fault) {
  CHECK(!fault.text.empty());
  check_text(fault.text);
}

}  // namespace moecached::fuzz
