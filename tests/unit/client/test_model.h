// A model file for client tests: any bytes will do, since a client only ever moves them. Every byte is a
// function of its file and offset, so that each test can say what must stand in a slot without keeping a
// copy. Thread: const after construction. Memory: owns a temporary folder with the files, removed at the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"

namespace moecached::client::test {

// A folder of its own for each test, under the test's working folder for temporary files.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  [[nodiscard]] std::string path(const std::string& name) const { return folder_ / name; }

 private:
  std::filesystem::path folder_;
};

class TestModel {
 public:
  struct Shape {
    std::uint32_t n_layers = 3;
    std::uint32_t n_experts = 16;
    std::uint32_t n_slots = 6;
    std::uint32_t n_expert_used = 4;
    std::uint32_t n_files = 2;  // layer l lies in file l % n_files
    // Bytes of one expert: sizes that are multiples of nothing, so that wrong arithmetic shows.
    std::vector<std::uint64_t> part_bytes{1000, 521, 4132};
    std::uint64_t stream_half_bytes = 3 * 4096;
    bool scattered = false;  // experts lie in reverse order, so that each needs an extent
  };

  TestModel() : TestModel(Shape{}) {}
  explicit TestModel(Shape shape);

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] const std::vector<std::string>& paths() const { return paths_; }
  [[nodiscard]] std::uint32_t file_of(std::uint32_t layer) const { return layer % shape_.n_files; }
  [[nodiscard]] std::uint64_t file_offset(std::uint32_t layer, std::uint32_t part) const;
  [[nodiscard]] std::uint64_t expert_offset(std::uint32_t layer, std::uint32_t part,
                                            std::uint32_t expert) const;
  [[nodiscard]] std::uint64_t slot_offset(std::uint32_t part) const;
  [[nodiscard]] std::uint64_t slot_stride() const;
  [[nodiscard]] std::uint64_t window_bytes() const;
  [[nodiscard]] static std::string part_name(std::uint32_t layer, std::uint32_t part);

  // Fills one part of an expert as it stands in the file.
  void fill_part(std::uint32_t layer, std::uint32_t part, std::uint32_t expert, std::byte* to) const;
  [[nodiscard]] bool part_is(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                             const void* bytes) const;
  // All parts of the expert stand in the slot of the window.
  [[nodiscard]] bool slot_holds(const moecached_layer_info& info, std::uint32_t layer, std::int32_t slot,
                                std::int32_t expert) const;

 private:
  Shape shape_;
  ScratchFolder folder_;
  std::vector<std::string> paths_;
};

}  // namespace moecached::client::test
