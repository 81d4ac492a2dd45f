// A lane in RAM slots for a client that routes over gRPC: it does what the client library's lane would do,
// over the same words and from what a client may map, so that the core loop, grace periods, leases and limits
// know nothing of it. Thread: that of the stream. Memory: owns its session; shares the model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/ipc/lane_writer.h"
#include "daemon/ipc/remote_session.h"
#include "daemon/ipc/route_ids.h"
#include "daemon/ipc/route_lane.h"
#include "daemon/ipc/route_segment.h"

namespace moecached {

class RemoteLane final : public RouteLane {
 public:
  // kLimit, kSystem.
  static Result<std::unique_ptr<RouteLane>> open(Core& core, std::uint64_t boot_epoch,
                                                 std::shared_ptr<SharedModel> model, const RouteOpen& open);
  ~RemoteLane() override;

  const RouteGeometry& geometry() const override { return geometry_; }
  Status decide(const RouteDecision& decision, const std::function<bool()>& gone, RouteAnswer* out) override;
  void release() override { lane_.complete(); }
  void leave_open() override { session_->leave_open(); }

 private:
  RemoteLane(std::unique_ptr<RemoteSession> session, std::shared_ptr<SharedModel> model,
             RouteSegment segment);
  Status describe_pool();
  [[nodiscard]] std::uint32_t load_entries(std::uint32_t layer);
  [[nodiscard]] Status wait_for_absent(const RouteDecision& decision, const std::function<bool()>& gone);
  void tell_changes(std::uint32_t layer, RouteAnswer* out);

  const std::unique_ptr<RemoteSession> session_;
  const std::shared_ptr<SharedModel> model_;
  const RouteSegment segment_;
  LaneWriter lane_;
  RouteIds ids_;
  RouteGeometry geometry_;
  std::vector<std::int32_t> slot_of_;             // by expert, of the decision
  std::vector<std::vector<std::int32_t>> known_;  // entries that the client has heard of, by layer
};

}  // namespace moecached
