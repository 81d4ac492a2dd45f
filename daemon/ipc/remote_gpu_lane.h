// A lane on a GPU for a client that routes over gRPC and opens device memory by a 64-byte CUDA IPC handle
// alone. Slots have no such handle, so the experts of a decision are copied, from this GPU's slots or from
// pinned RAM, into memory of its own that has one. An epoch lasts as long as the copy; slots that it read are
// free again before the client has its answer. To the core loop it is a lane like any other: begun,
// completed, a log. Thread: that of the stream. Memory: owns its session and the shared buffer; shares the
// model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/ipc/gpu_model.h"
#include "daemon/ipc/lane_writer.h"
#include "daemon/ipc/remote_session.h"
#include "daemon/ipc/ring_reader.h"
#include "daemon/ipc/route_ids.h"
#include "daemon/ipc/route_lane.h"
#include "daemon/ipc/route_segment.h"

namespace moecached {

class RemoteGpuLane final : public RouteLane {
 public:
  struct Options {
    std::uint64_t boot_epoch = 0;
    std::uint64_t keep_free = 0;  // device memory that is to stay free
  };
  // kLimit, kSystem.
  static Result<std::unique_ptr<RouteLane>> open(Core& core, const Options& options,
                                                 std::shared_ptr<GpuModel> model, const RouteOpen& open);
  ~RemoteGpuLane() override;

  const RouteGeometry& geometry() const override { return geometry_; }
  Status decide(const RouteDecision& decision, const std::function<bool()>& gone, RouteAnswer* out) override;
  void release() override {}  // nothing of the model is held between two decisions
  void leave_open() override { session_->leave_open(); }

 private:
  struct Place {                 // of a distinct expert of the decision
    std::int32_t read_from = 0;  // slot of the window
    std::uint32_t record = 0;    // of the buffer
  };
  RemoteGpuLane(std::unique_ptr<RemoteSession> session, std::shared_ptr<GpuModel> model, RouteSegment segment,
                std::shared_ptr<Memfd> log);
  Status share_buffer(const Options& options, std::uint32_t experts);
  [[nodiscard]] Status begin(const std::function<bool()>& gone);
  [[nodiscard]] Result<std::uint32_t> copy(const RouteDecision& decision);
  void log(const RouteDecision& decision);

  const std::unique_ptr<RemoteSession> session_;
  const std::shared_ptr<GpuModel> model_;
  const RouteSegment segment_;
  const std::shared_ptr<Memfd> log_;
  const std::vector<LayerLimits> limits_;
  LaneWriter lane_;
  RouteIds ids_;
  RouteGeometry geometry_;
  std::unique_ptr<GpuIpcBuffer> buffer_;
  std::vector<Place> place_of_;  // by expert
  std::vector<GpuIpcBuffer::Copy> copies_;
};

}  // namespace moecached
