// eventfd, epoll, futex and clock: what one thread or process tells another with.
#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <atomic>
#include <thread>

#include "daemon/platform/clock.h"
#include "daemon/platform/epoll.h"
#include "daemon/platform/eventfd.h"
#include "daemon/platform/futex.h"
#include "daemon/platform/memfd.h"

namespace moecached {
namespace {

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

TEST(EventFd, IsReadableFromASignalUntilADrain) {
  const Result<EventFd> event = EventFd::create();
  ASSERT_TRUE(event);
  EXPECT_FALSE(readable(event->fd()));
  event->signal();
  event->signal();
  EXPECT_TRUE(readable(event->fd()));
  event->drain();
  EXPECT_FALSE(readable(event->fd()));
  event->drain();  // must not block
}

TEST(Epoll, GivesTheTokenOfWhatIsReady) {
  Result<Epoll> epoll = Epoll::create();
  const Result<EventFd> a = EventFd::create(), b = EventFd::create();
  ASSERT_TRUE(epoll && a && b);
  ASSERT_TRUE(epoll->add(a->fd(), EPOLLIN, 11));
  ASSERT_TRUE(epoll->add(b->fd(), EPOLLIN, 22));
  std::array<epoll_event, 4> events{};
  EXPECT_EQ(epoll->wait(events, 0), 0u);
  b->signal();
  ASSERT_EQ(epoll->wait(events, -1), 1u);
  EXPECT_EQ(events[0].data.u64, 22u);
  a->signal();
  EXPECT_EQ(epoll->wait(events, -1), 2u);
  epoll->remove(b->fd());
  ASSERT_EQ(epoll->wait(events, -1), 1u);
  EXPECT_EQ(events[0].data.u64, 11u);
  ASSERT_TRUE(epoll->modify(a->fd(), 0, 11));
  EXPECT_EQ(epoll->wait(events, 0), 0u);
}

TEST(Epoll, FaultsOnADescriptorItCannotWatch) {
  Result<Epoll> epoll = Epoll::create();
  ASSERT_TRUE(epoll);
  const Status status = epoll->add(-1, EPOLLIN, 0);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, FaultCode::kSystem);
}

TEST(Futex, WakesAWaiterThatMapsTheWordElsewhere) {
  const Result<Memfd> memory = Memfd::create("futex", 4096, ClientAccess::kReadWrite);
  ASSERT_TRUE(memory);
  const Result<Mapping> other = Mapping::map(memory->fd(), 4096, ClientAccess::kReadWrite);
  ASSERT_TRUE(other);
  auto* const here = reinterpret_cast<std::uint32_t*>(memory->bytes().data());
  auto* const there = reinterpret_cast<std::uint32_t*>(other->bytes().data());
  ASSERT_NE(here, there);
  FutexWait result = FutexWait::kTimedOut;
  std::thread waiter([&] { result = futex_wait(there, 0, 100'000'000'000); });
  while (futex_wake(here) == 0)
    std::this_thread::yield();  // 1 only when the waiter was found through the other address
  waiter.join();
  EXPECT_EQ(result, FutexWait::kWoken);
}

TEST(Futex, ReturnsAtOnceWhenTheWordIsNotAsExpected) {
  std::uint32_t word = 5;
  EXPECT_EQ(futex_wait(&word, 4, 100'000'000'000), FutexWait::kChanged);
}

TEST(Futex, TimesOut) {
  std::uint32_t word = 5;
  const std::uint64_t start = monotonic_ns();
  EXPECT_EQ(futex_wait(&word, 5, 2'000'000), FutexWait::kTimedOut);
  EXPECT_GE(monotonic_ns() - start, 2'000'000u);
}

TEST(Clock, NeverGoesBack) {
  std::uint64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t now = monotonic_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace moecached
