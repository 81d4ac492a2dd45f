// A lane on a GPU: one backend instance whose graphs read the model's windows. begin() and submit() are the
// client's side of "the protocol of a lane on a GPU" in proto/shm/layout.h:
//
//   begin   begun = epoch | ALL, full fence; nothing new -> go          (no lock, no system call, no driver
//   call) launch  the caller's graph, on the caller's stream submit  this lane's stream waits for the graph,
//   copies the slots it used into the log entry, writes
//           completed = epoch: all of it on the GPU, behind the graph
//
// `completed` has two writers, this thread and the GPU, in turn: this thread writes it only after it has
// waited for all that was launched, or an older epoch's write would arrive later and take it back. Thread:
// one at a time. Memory: owns its stream; borrows model, mapping, connection and block. No allocation after
// attach().
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <span>

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"
#include "client/src/gpu_mapping.h"

namespace moecached::client {

class GpuModel;

class GpuLane {
 public:
  // Makes the stream; attach() must follow.
  [[nodiscard]] static moecached_status open(GpuModel& model, const GpuMapping& mapping,
                                             std::unique_ptr<GpuLane>* out);
  ~GpuLane();
  GpuLane(const GpuLane&) = delete;
  GpuLane& operator=(const GpuLane&) = delete;

  // Moves the lane to a block. REQUIRES: no epoch is begun, all that was submitted is done. Fails only as
  // check_attach() does.
  [[nodiscard]] moecached_status attach(const GpuMapping& mapping, Connection& connection, LaneBlock* block);
  [[nodiscard]] static moecached_status check_attach(const GpuMapping& mapping, LaneBlock* block);

  [[nodiscard]] moecached_status begin();
  [[nodiscard]] moecached_status submit(const moecached_gpu_submit& submit);
  // REQUIRES: the model has given this lane its scratch slots.
  [[nodiscard]] moecached_status fetch(const moecached_gpu_fetch& request);
  // Waits for what was submitted, and for what was launched in an epoch that was never submitted.
  [[nodiscard]] moecached_status settle() noexcept;

  [[nodiscard]] LaneBlock* block() const noexcept { return block_; }

 private:
  explicit GpuLane(GpuModel& model) : model_(model) {}
  [[nodiscard]] bool memory_is_there(bool new_shapes) const noexcept;
  [[nodiscard]] moecached_status catch_up();
  [[nodiscard]] moecached_status wait_until_loaded();
  [[nodiscard]] moecached_status check(const moecached_gpu_submit& submit) const;
  [[nodiscard]] bool log_entry_is_free() const noexcept;
  [[nodiscard]] moecached_status log(const moecached_gpu_submit& submit);

  GpuModel& model_;
  const GpuMapping* mapping_ = nullptr;
  Connection* connection_ = nullptr;
  LaneBlock* block_ = nullptr;
  std::shared_ptr<CudaContext> context_;  // of the stream, which outlives mappings
  CUstream stream_ = nullptr;
  CUdeviceptr completed_ = 0;  // words.completed, as the GPU sees it
  bool begun_ = false;         // an epoch is begun and not submitted: kernels may be under way that only the
                               // caller's stream knows
};

}  // namespace moecached::client
