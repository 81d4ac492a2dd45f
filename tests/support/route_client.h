// A client of Control.Route, as an engine without shared memory would write one: it knows the contract and
// nothing of this project's code. Maps the pool if it was asked to. Thread: one at a time.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/control/v1/control.grpc.pb.h"

namespace moecached::test {

class RouteClient {
 public:
  explicit RouteClient(const std::string& control_socket);
  ~RouteClient();  // ends the stream
  RouteClient(const RouteClient&) = delete;
  RouteClient& operator=(const RouteClient&) = delete;

  // False: the daemon ended the stream, finish() says why. With memory POOL, also maps it; an answer that
  // names another file than it claims aborts.
  bool open(const control::v1::RouteOpen& request);
  // True: `slots()` has the answer. False: it was refused, or the stream has ended.
  bool decide(std::uint32_t layer, const std::vector<std::uint32_t>& experts, std::uint32_t n_tokens = 1,
              bool prefill = false);
  bool send(const control::v1::RouteRequest& request) { return stream_->Write(request); }
  bool receive() { return stream_->Read(&response_); }
  bool release();
  void cancel() { context_.TryCancel(); }
  grpc::Status finish();

  [[nodiscard]] const control::v1::RouteGeometry& geometry() const { return geometry_; }
  [[nodiscard]] const control::v1::RouteSlots& slots() const { return response_.slots(); }
  [[nodiscard]] const control::v1::RouteRefused& refused() const { return response_.refused(); }
  [[nodiscard]] bool was_refused() const { return response_.has_refused(); }
  // Bytes of a part of what lies in a slot of the mapped pool.
  [[nodiscard]] std::span<const std::byte> part(std::uint32_t layer, std::uint32_t slot, int part) const;

 private:
  void map_pool();
  grpc::ClientContext context_;
  std::unique_ptr<control::v1::Control::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<control::v1::RouteRequest, control::v1::RouteResponse>> stream_;
  control::v1::RouteGeometry geometry_;
  control::v1::RouteRequest request_;
  control::v1::RouteResponse response_;
  std::uint64_t sequence_ = 0;
  std::span<const std::byte> pool_;
  bool finished_ = false;
};

}  // namespace moecached::test
