// Faults as gRPC knows them: which code says what, control.proto lists. Thread: any.
#pragma once

#include <grpcpp/support/status.h>

#include "daemon/base/result.h"

namespace moecached {

[[nodiscard]] inline grpc::StatusCode code_of(FaultCode code) {
  switch (code) {
    case FaultCode::kInvalid:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case FaultCode::kNotFound:
      return grpc::StatusCode::NOT_FOUND;
    case FaultCode::kLimit:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    // Not UNIMPLEMENTED: that is how gRPC says that a method does not exist, and an old daemon must be told
    // apart.
    case FaultCode::kUnsupported:
    case FaultCode::kSpill:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case FaultCode::kSystem:
      return grpc::StatusCode::INTERNAL;
    case FaultCode::kChanged:
      return grpc::StatusCode::ABORTED;
  }
  return grpc::StatusCode::UNKNOWN;
}

[[nodiscard]] inline grpc::Status status_of(const Fault& fault) { return {code_of(fault.code), fault.text}; }

}  // namespace moecached
