// Where the experts of one decision lie in the device memory that a stream shares with its client: records of
// all parts, one behind the other, in every layer from the start of the buffer. Pure. Thread: any.
#pragma once

#include <cstdint>

#include "daemon/base/result.h"
#include "daemon/ipc/route_lane.h"

namespace moecached {

inline constexpr std::uint64_t kRouteBufferBytesMax = 1ull << 30;

// Lays out every layer of the geometry (slot_stride, slot_offset of parts, n_slots) for decisions of up to
// `experts` distinct experts; 0: as many as a token uses. Returns the bytes, in whole multiples of
// `granularity`. kLimit: it is more than kRouteBufferBytesMax.
Result<std::uint64_t> plan_route_buffer(std::uint32_t experts, std::uint64_t granularity,
                                        RouteGeometry* geometry);

}  // namespace moecached
