#include "daemon/control/route_streams.h"

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "daemon/control/fault_status.h"
#include "daemon/control/translate.h"

namespace moecached {
namespace {

using grpc::StatusCode;

grpc::Status stopping() { return {StatusCode::UNAVAILABLE, "the daemon is stopping"}; }

}  // namespace

grpc::Status RouteStreams::serve(grpc::ServerContext* context, Stream* stream) {
  if (max_streams_ == 0) {
    return {
        StatusCode::FAILED_PRECONDITION,
        "this daemon takes no routing decisions over gRPC: set [control] route = true and restart it, or use "
        "the handle socket"};
  }
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return stopping();
    if (served_.size() >= max_streams_) {
      return {StatusCode::RESOURCE_EXHAUSTED,
              "there are " + std::to_string(served_.size()) +
                  " streams already, limits.route_streams = " + std::to_string(max_streams_)};
    }
    served_.insert(context);
  }
  const auto leave = [this](grpc::ServerContext* served) {
    const std::lock_guard lock(mutex_);
    served_.erase(served);
  };
  const std::unique_ptr<grpc::ServerContext, decltype(leave)> place(context, leave);
  return route(*context, stream);
}

void RouteStreams::end() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  for (grpc::ServerContext* const context : served_) context->TryCancel();
}

bool RouteStreams::ending() {
  const std::lock_guard lock(mutex_);
  return ending_;
}

grpc::Status RouteStreams::route(const grpc::ServerContext& context, Stream* stream) {
  control::v1::RouteRequest request;
  if (!stream->Read(&request)) return ending() ? stopping() : grpc::Status::OK;
  if (!request.has_open()) return {StatusCode::INVALID_ARGUMENT, "a stream begins with open"};
  Result<RouteOpen> open = route_open_of(request.open());
  if (!open) return status_of(open.error());
  Result<std::unique_ptr<RouteLane>> opened = daemon_.open_route(*open);
  if (!opened) return status_of(opened.error());
  RouteLane& lane = **opened;
  control::v1::RouteResponse response;
  translate(lane.geometry(), response.mutable_geometry());
  const std::function<bool()> gone = [&context] { return context.IsCancelled(); };
  RouteAnswer answer;
  grpc::Status status;
  for (bool written = stream->Write(response); written && stream->Read(&request);) {
    if (request.has_release()) {
      lane.release();
      continue;
    }
    if (!request.has_decision()) {
      status = {StatusCode::INVALID_ARGUMENT,
                request.has_open() ? "open comes once" : "a message that is none of RouteRequest's"};
      break;
    }
    const control::v1::RouteDecision& decision = request.decision();
    const Status decided = lane.decide(
        {.layer = decision.layer(),
         .experts = {decision.experts().data(), static_cast<std::size_t>(decision.experts_size())},
         .n_tokens = decision.n_tokens(),
         .prefill = decision.prefill()},
        gone, &answer);
    if (decided) {
      translate(answer, decision.sequence(), response.mutable_slots());
    } else {
      control::v1::RouteRefused& refused = *response.mutable_refused();
      refused.set_sequence(decision.sequence());
      refused.set_code(static_cast<std::uint32_t>(code_of(decided.error().code)));
      refused.set_text(decided.error().text);
    }
    written = stream->Write(response);
  }
  if (!ending()) return status;
  lane.leave_open();
  return stopping();
}

}  // namespace moecached
