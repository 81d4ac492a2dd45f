#include <gtest/gtest.h>

#include "daemon/ipc/routing_tap.h"
#include "tests/unit/tier/counted_new.h"

namespace moecached {
namespace {

TEST(RoutingTap, PutsWithoutAllocatingAlsoWhenItIsFull) {
  RoutingTaps taps;
  const auto tap = std::make_shared<RoutingTap>(ModelId(1), 4096);
  taps.open(tap);
  const std::vector<ExpertIndex> experts(10, ExpertIndex(3));
  const std::uint64_t before = n_allocations();
  for (int i = 0; i < 1000; ++i) taps.put(ModelId(1), RoutingEvent{}, experts);
  EXPECT_EQ(n_allocations(), before);
  EXPECT_GT(tap->dropped(), 0u);
  const std::vector<int> one(1);  // the count does count
  EXPECT_GT(n_allocations(), before);
}

}  // namespace
}  // namespace moecached
