// What one daemon gave of a model on a GPU, mapped: the table, and one window of addresses for each part,
//
//   | device slots, mapped chunk by chunk as the daemon adds them | host slots | scratch slots |
//   0                                                   device_bytes
//
// of its own GPU and, where this process can map them, of other GPUs; scratch slots are this process's own;
// all but the scratch slots (see scratch_plan.h) read-only for the GPU; a stray write of a kernel ends that
// process and harms no other. A chunk is mapped before the first epoch that may meet it, and addresses never
// change while the object lives. Thread: open(), map_chunks() and the end under the session's lock; the rest
// from any. Memory: owns the addresses and a share of the GPU's primary context; borrows nothing from the
// connection after open() but its session segment, which must outlive it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"
#include "client/src/cuda_driver.h"
#include "client/src/gpu_scratch.h"
#include "client/src/gpu_segment.h"
#include "client/src/model_files.h"
#include "client/src/scratch_plan.h"

namespace moecached::client {

class GpuMapping {
 public:
  [[nodiscard]] static moecached_status open(Connection& connection, const ModelFiles& files,
                                             const GpuUuid& uuid, std::unique_ptr<GpuMapping>* out);
  ~GpuMapping();
  GpuMapping(const GpuMapping&) = delete;
  GpuMapping& operator=(const GpuMapping&) = delete;

  // Maps the chunks that the daemon has added.
  [[nodiscard]] moecached_status map_chunks(Connection& connection);
  [[nodiscard]] std::uint32_t chunks_mapped() const noexcept {
    return chunks_mapped_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] const GpuLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] const GpuSegmentWords& words() const noexcept { return words_; }
  [[nodiscard]] const CudaContext& context() const noexcept { return *context_; }
  [[nodiscard]] const std::shared_ptr<CudaContext>& shared_context() const noexcept { return context_; }
  [[nodiscard]] std::uint32_t model_id() const noexcept { return layout_.model.model.model_id; }
  [[nodiscard]] CUdeviceptr window(std::uint32_t part_index) const { return windows_[part_index].address; }
  [[nodiscard]] CUdeviceptr table(std::uint32_t layer) const;
  [[nodiscard]] CUdeviceptr identity_table() const;
  // This lane's part of the log segment.
  [[nodiscard]] std::byte* log(std::uint32_t lane) const noexcept {
    return log_.data() + lane * layout_.gpu.log_bytes_per_lane;
  }

  // Scratch slots, for one lane; made at the first call. None: the plan has none, or host memory is a memfd.
  [[nodiscard]] moecached_status open_scratch();
  [[nodiscard]] const GpuScratch* scratch() const noexcept { return scratch_.get(); }

  // Waits for everything this process has launched on the GPU.
  moecached_status synchronize() const noexcept;

 private:
  // Addresses and what is mapped in them.
  struct Range {
    struct Piece {
      CUdeviceptr address;
      std::uint64_t bytes;
    };
    CUdeviceptr address = 0;
    CUdeviceptr reserved = 0;  // by cuMemAddressReserve
    std::uint64_t reserved_bytes = 0;
    std::vector<Piece> pieces;  // by cuMemMap
    Mapping memory;             // the host part, when it is a memfd
    std::shared_ptr<HostRegistration> registration;
  };

  GpuMapping() = default;
  moecached_status check_device() const;
  moecached_status probe_peers(Connection& connection, const GpuUuid& uuid, std::string* why_not);
  moecached_status map_table(UniqueFd memory);
  moecached_status map_host_parts(Connection& connection, std::uint32_t host_memory);
  moecached_status map_host_allocation(std::uint32_t part, UniqueFd memory);
  moecached_status map_host_memfd(std::uint32_t part, const UniqueFd& memory);
  moecached_status map_memfd_behind(const moecached_shm_window& window, const UniqueFd& memory,
                                    int protection, Range* range, bool* taken);
  moecached_status register_lanes(Connection& connection);
  moecached_status import(Range* range, std::uint64_t offset, std::uint64_t bytes, UniqueFd memory);
  static void release(Range& range) noexcept;

  GpuLayout layout_;
  GpuSegmentWords words_;
  Mapping segment_, log_;
  std::shared_ptr<CudaContext> context_;
  std::shared_ptr<HostRegistration> lanes_registration_, log_registration_;
  Range table_;
  std::vector<Range> windows_;
  ScratchPlan scratch_plan_;
  std::unique_ptr<GpuScratch> scratch_;
  bool reads_peers_ = false;  // the daemon was told so
  std::atomic<std::uint32_t> chunks_mapped_{0};
};

}  // namespace moecached::client
