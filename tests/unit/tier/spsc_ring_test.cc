#include "daemon/tier/spsc_ring.h"

#include <gtest/gtest.h>

#include <thread>

namespace moecached {
namespace {

TEST(SpscRing, ShowsNothingBeforeItIsPublished) {
  SpscRing<int> ring(4);
  ring.push(1);
  ring.push(2);
  int value = 0;
  EXPECT_TRUE(ring.empty());
  EXPECT_FALSE(ring.pop(value));
  ring.publish();
  EXPECT_FALSE(ring.empty());
  ASSERT_TRUE(ring.pop(value));
  EXPECT_EQ(value, 1);
  ASSERT_TRUE(ring.pop(value));
  EXPECT_EQ(value, 2);
  EXPECT_TRUE(ring.empty());
}

TEST(SpscRing, HoldsAsManyAsAskedForAnyNumberOfTimes) {
  SpscRing<std::uint64_t> ring(5);
  std::uint64_t next_in = 0, next_out = 0, value = 0;
  for (int round = 0; round < 1000; ++round) {
    for (int i = 0; i < 5; ++i) ring.push(next_in++);
    ring.publish();
    while (ring.pop(value)) ASSERT_EQ(value, next_out++);
  }
  EXPECT_EQ(next_out, next_in);
}

TEST(SpscRing, HandsEverythingToAnotherThreadInOrder) {
  constexpr std::uint64_t kValues = 50'000;
  SpscRing<std::uint64_t> there(64), back(64);  // `back` bounds what is under way
  std::thread echo([&] {
    std::uint64_t value = 0;
    for (std::uint64_t n = 0; n < kValues;) {
      if (!there.pop(value)) {
        std::this_thread::yield();
        continue;
      }
      back.push(value);
      back.publish();
      ++n;
    }
  });
  std::uint64_t sent = 0, received = 0, value = 0;
  bool in_order = true;
  while (received < kValues) {
    while (sent < kValues && sent - received < 64) there.push(sent++);
    there.publish();
    while (back.pop(value)) in_order &= value == received++;
    std::this_thread::yield();
  }
  echo.join();
  EXPECT_TRUE(in_order);
}

}  // namespace
}  // namespace moecached
