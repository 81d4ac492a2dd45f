#include "tests/unit/client/test_model.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <stdexcept>

namespace moecached::client::test {
namespace {

constexpr std::uint64_t kFileHead = 97;  // parts start at odd offsets

std::byte byte_at(std::uint32_t file, std::uint64_t offset) {
  std::uint64_t x = offset + (std::uint64_t{file} << 40);
  x = (x ^ (x >> 7)) * 0x9e3779b97f4a7c15u;
  return static_cast<std::byte>(x >> 56);
}

}  // namespace

ScratchFolder::ScratchFolder() {
  std::string pattern = std::filesystem::temp_directory_path() / "moecached-client-test-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
  folder_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

TestModel::TestModel(Shape shape) : shape_(std::move(shape)) {
  for (std::uint32_t file = 0; file < shape_.n_files; ++file) {
    std::uint64_t bytes = kFileHead;
    for (std::uint32_t layer = 0; layer < shape_.n_layers; ++layer) {
      for (const std::uint64_t part : shape_.part_bytes)
        bytes += file_of(layer) == file ? part * shape_.n_experts : 0;
    }
    std::vector<char> content(bytes);
    for (std::uint64_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(byte_at(file, i));
    paths_.push_back(folder_.path("model-" + std::to_string(file) + ".bin"));
    std::ofstream(paths_.back(), std::ios::binary).write(content.data(), static_cast<std::streamsize>(bytes));
  }
}

std::uint64_t TestModel::file_offset(std::uint32_t layer, std::uint32_t part) const {
  std::uint64_t offset = kFileHead;
  for (std::uint32_t l = file_of(layer); l <= layer; l += shape_.n_files) {
    for (std::uint32_t p = 0; p < (l == layer ? part : shape_.part_bytes.size()); ++p) {
      offset += shape_.part_bytes[p] * shape_.n_experts;
    }
  }
  return offset;
}

std::uint64_t TestModel::expert_offset(std::uint32_t layer, std::uint32_t part, std::uint32_t expert) const {
  const std::uint32_t index = shape_.scattered ? shape_.n_experts - 1 - expert : expert;
  return file_offset(layer, part) + index * shape_.part_bytes[part];
}

std::uint64_t TestModel::slot_offset(std::uint32_t part) const {
  std::uint64_t offset = 0;
  for (std::uint32_t p = 0; p < part; ++p) offset += (shape_.part_bytes[p] + 31) / 32 * 32;
  return offset;
}

std::uint64_t TestModel::slot_stride() const {
  return slot_offset(static_cast<std::uint32_t>(shape_.part_bytes.size()));
}

std::uint64_t TestModel::window_bytes() const {
  return (slot_stride() * shape_.n_slots + 4095) / 4096 * 4096;
}

std::string TestModel::part_name(std::uint32_t layer, std::uint32_t part) {
  return "blk." + std::to_string(layer + 1) + ".part_" + std::to_string(part) + ".weight";
}

void TestModel::fill_part(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                          std::byte* to) const {
  const std::uint64_t first = expert_offset(layer, part, expert);
  for (std::uint64_t i = 0; i < shape_.part_bytes[part]; ++i) to[i] = byte_at(file_of(layer), first + i);
}

bool TestModel::part_is(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                        const void* bytes) const {
  std::vector<std::byte> expected(shape_.part_bytes[part]);
  fill_part(layer, part, expert, expected.data());
  return std::memcmp(expected.data(), bytes, expected.size()) == 0;
}

bool TestModel::slot_holds(const moecached_layer_info& info, std::uint32_t layer, std::int32_t slot,
                           std::int32_t expert) const {
  if (slot < 0 || static_cast<std::uint32_t>(slot) >= info.n_window_slots) return false;
  const std::byte* record = static_cast<const std::byte*>(info.window) + slot * info.slot_stride;
  for (std::uint32_t part = 0; part < shape_.part_bytes.size(); ++part) {
    if (!part_is(layer, part, static_cast<std::uint32_t>(expert), record + slot_offset(part))) return false;
  }
  return true;
}

}  // namespace moecached::client::test
