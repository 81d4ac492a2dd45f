// Reports of the daemon as messages of the control protocol. Pure functions. Thread: any.
#pragma once

#include <span>

#include "daemon/ipc/daemon_control.h"
#include "proto/control/v1/control.pb.h"

namespace moecached {

void translate(const StatusReport& from, control::v1::Status* to);
void translate(const PolicyReport& from, control::v1::Policy* to);
void translate(const ModelReport& from, control::v1::Model* to);
void translate(const SessionReport& from, control::v1::Session* to);
void translate(const Finding& from, control::v1::Finding* to);
void translate(const PolicyComparison& from, control::v1::PolicyComparison* to);

void translate(const RoutingEvent& from, std::span<const std::uint32_t> experts,
               control::v1::RoutingEvent* to);

// kInvalid: a kind of memory that there is not.
[[nodiscard]] Result<RouteOpen> route_open_of(const control::v1::RouteOpen& from);
void translate(const RouteGeometry& from, control::v1::RouteGeometry* to);
// Over what `to` held.
void translate(const RouteAnswer& from, std::uint64_t sequence, control::v1::RouteSlots* to);

struct StatsSource {
  const StatusReport& status;
  const std::vector<ModelReport>& models;
  const std::vector<SessionReport>& sessions;
};
// One snapshot: sums over layers, models and sessions.
void translate(const StatsSource& from, control::v1::Stats* to);

}  // namespace moecached
