#include "daemon/ipc/route_buffer.h"

#include <gmock/gmock.h>

namespace moecached {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kGranularity = 2u << 20;

RouteGeometry two_layers() {
  RouteGeometry geometry;
  geometry.n_expert_used = 4;
  for (const std::uint64_t bytes : {1000u, 300000u}) {
    RouteLayer& layer = geometry.layers.emplace_back();
    layer.n_experts = 32;
    for (int p = 0; p < 3; ++p) {
      RoutePart& part = layer.parts.emplace_back();
      part.expert_bytes = bytes;
    }
  }
  return geometry;
}

TEST(RouteBuffer, RecordsOfADecisionLieApartAndWithinTheBuffer) {
  RouteGeometry geometry = two_layers();
  const Result<std::uint64_t> bytes = plan_route_buffer(6, kGranularity, &geometry);
  ASSERT_TRUE(bytes) << bytes.error().text;
  EXPECT_EQ(*bytes % kGranularity, 0u);
  for (const RouteLayer& layer : geometry.layers) {
    EXPECT_EQ(layer.n_slots, 6u);
    EXPECT_LE(layer.window_offset + layer.n_slots * layer.slot_stride, *bytes);
    std::uint64_t end = 0;
    for (const RoutePart& part : layer.parts) {
      EXPECT_GE(part.slot_offset, end);
      EXPECT_EQ(part.slot_offset % 256, 0u);
      end = part.slot_offset + part.expert_bytes + 1024;  // kernels read past the end
    }
    EXPECT_LE(end, layer.slot_stride);
    EXPECT_EQ(layer.slot_stride % 256, 0u);
  }
}

TEST(RouteBuffer, HasRoomForATokenUnlessMoreIsAskedForAndNeverForMoreThanThereIs) {
  RouteGeometry geometry = two_layers();
  ASSERT_TRUE(plan_route_buffer(0, kGranularity, &geometry));
  EXPECT_EQ(geometry.layers[0].n_slots, 4u);
  ASSERT_TRUE(plan_route_buffer(UINT32_MAX, kGranularity, &geometry));
  EXPECT_EQ(geometry.layers[0].n_slots, 32u);
}

TEST(RouteBuffer, MoreThanTheLimitIsRefusedWithIt) {
  RouteGeometry geometry = two_layers();
  geometry.layers[1].parts[0].expert_bytes = 100u << 20;
  const Result<std::uint64_t> bytes = plan_route_buffer(32, kGranularity, &geometry);
  ASSERT_FALSE(bytes);
  EXPECT_EQ(bytes.error().code, FaultCode::kLimit);
  EXPECT_THAT(bytes.error().text, HasSubstr("1024 MiB: ask for fewer"));
}

}  // namespace
}  // namespace moecached
