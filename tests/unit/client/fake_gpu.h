// The fake daemon's model on a GPU: segment, log, table and windows, out of memfds, which the soft CUDA
// driver takes for memory of a GPU. Written against proto/shm/layout.h alone, no code of the client and no
// CUDA. It moves nothing by itself: tests publish chunks, entries and shapes, and drain the log. Thread: any;
// the words that clients look at are atomic. Memory: owns its memfds.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "client/src/resources.h"
#include "proto/shm/layout.h"
#include "tests/unit/client/test_model.h"

namespace moecached::client::test {

inline constexpr std::uint32_t kGpuModelId = 6;
inline constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;

struct GpuSegmentView {
  moecached_shm_header* header;
  moecached_shm_model* model;
  moecached_shm_gpu* gpu;
  moecached_shm_layer* layers;
  moecached_shm_part* parts;
  moecached_shm_window* windows;
  moecached_shm_chunk* chunks;
};

struct FakeGpuOptions {
  std::array<std::uint8_t, MOECACHED_UUID_BYTES> uuid{0x50, 0xf7, 0xc0, 0xda, 0, 0, 0, 0,
                                                      0,    0,    0,    0,    0, 0, 0, 1};
  bool memfd = false;  // host memory: else allocations of the driver
  std::uint32_t load_state = MOECACHED_COVERED;
  std::uint32_t log_entries = 8;
  std::uint32_t fetch_max = 4;       // descriptors in one reply, to make the client come again
  int probe_fd = -1;                 // memory of another GPU, borrowed; -1: there is none
  bool dies_on_chunk_fetch = false;  // the next one after the model was opened
  std::function<void(GpuSegmentView)> spoil = nullptr;
  std::function<void(moecached_handle_gpu_opened&)> spoil_opened = nullptr;
};

struct SeenLogEntry {
  moecached_shm_log_entry header{};
  std::vector<std::uint16_t> layers;
  std::vector<std::vector<std::int32_t>> slots;  // of each row
};

class FakeGpu {
 public:
  FakeGpu(const TestModel& model, FakeGpuOptions options, std::uint64_t boot_epoch, std::uint32_t n_lanes);

  // Puts an expert's bytes into a device slot of a chunk that exists.
  void put(std::uint32_t layer, std::uint32_t slot, std::uint32_t expert);
  void set_entry(std::uint32_t layer, std::uint32_t expert, std::int32_t slot);
  // The second half of the device's part of a window; returns its first slot. publish() makes it known.
  std::uint32_t add_chunk(std::uint32_t layer, std::uint32_t part);
  void publish_chunks();
  void set_all_resident(std::uint32_t layer, std::uint32_t value);
  void set_load_state(std::uint32_t value);
  [[nodiscard]] std::uint32_t host_first() const { return host_first_; }
  [[nodiscard]] SeenLogEntry log_entry(std::uint32_t lane, std::uint64_t epoch) const;

  // For the daemon's socket.
  [[nodiscard]] moecached_handle_gpu_opened opened() const;
  [[nodiscard]] std::vector<int> opened_fds() const;
  [[nodiscard]] std::vector<int> handles(const moecached_handle_gpu_fetch& wanted) const;
  [[nodiscard]] const FakeGpuOptions& options() const { return options_; }
  [[nodiscard]] const Mapping& segment() const { return segment_; }
  [[nodiscard]] std::uint64_t log_bytes() const { return log_.bytes(); }

 private:
  struct Memory {
    UniqueFd fd;
    Mapping bytes;
  };
  [[nodiscard]] std::uint32_t n_parts() const {
    return static_cast<std::uint32_t>(model_.shape().part_bytes.size());
  }

  const TestModel& model_;
  const FakeGpuOptions options_;
  UniqueFd segment_fd_, log_fd_, table_fd_;
  Mapping segment_, log_, table_;
  GpuSegmentView view_{};
  std::uint32_t host_first_ = 0;
  std::uint32_t n_chunks_ = 0;
  std::vector<Memory> host_, chunks_;
};

}  // namespace moecached::client::test
