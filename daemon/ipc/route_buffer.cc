#include "daemon/ipc/route_buffer.h"

#include <algorithm>
#include <string>

namespace moecached {
namespace {

constexpr std::uint64_t kAlignment = 256;  // as cudaMalloc gives: kernels load 16 bytes at once
// Kernels read past the last row of an expert, up to 512 elements of a quantized type.
constexpr std::uint64_t kPadding = 1024;

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Result<std::uint64_t> plan_route_buffer(std::uint32_t experts, std::uint64_t granularity,
                                        RouteGeometry* geometry) {
  const std::uint32_t wanted = experts == 0 ? geometry->n_expert_used : experts;
  std::uint64_t bytes = 0;
  for (RouteLayer& layer : geometry->layers) {
    std::uint64_t at = 0;
    for (RoutePart& part : layer.parts) {
      part.slot_offset = at;
      at = round_up(at + part.expert_bytes + kPadding, kAlignment);
    }
    layer.window_offset = 0;
    layer.slot_stride = at;
    layer.n_slots = std::clamp(wanted, 1u, layer.n_experts);
    bytes = std::max(bytes, layer.n_slots * layer.slot_stride);
  }
  bytes = round_up(bytes, granularity);
  if (bytes > kRouteBufferBytesMax) {
    return Fault{FaultCode::kLimit, "room for " + std::to_string(wanted) + " experts of a layer takes " +
                                        std::to_string(bytes >> 20) +
                                        " MiB of device memory, a stream has at most " +
                                        std::to_string(kRouteBufferBytesMax >> 20) + " MiB: ask for fewer"};
  }
  return bytes;
}

}  // namespace moecached
