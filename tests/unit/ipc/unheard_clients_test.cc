#include "daemon/ipc/unheard_clients.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

TEST(UnheardClients, OneThatSpeaksIsNotCutAndOneThatDoesNotIs) {
  UnheardClients clients(1000);
  EXPECT_EQ(clients.wait_ms(0), -1);
  ASSERT_TRUE(clients.add(5, 1, 0));
  ASSERT_TRUE(clients.add(6, 1, 300));
  EXPECT_EQ(clients.wait_ms(400), 600);
  EXPECT_EQ(clients.expired(999), std::vector<int>{});
  EXPECT_EQ(clients.expired(1000), std::vector<int>{5});
  EXPECT_EQ(clients.expired(1300), (std::vector<int>{5, 6}));
  EXPECT_TRUE(clients.contains(5));
  clients.remove(5);
  EXPECT_FALSE(clients.contains(5));
  EXPECT_EQ(clients.expired(1000), std::vector<int>{});
  EXPECT_EQ(clients.wait_ms(1000), 300);
  clients.remove(6);
  EXPECT_EQ(clients.expired(100000), std::vector<int>{});
  EXPECT_EQ(clients.wait_ms(100000), -1);
}

TEST(UnheardClients, OneUserLeavesRoomForOthers) {
  UnheardClients clients(1000);
  int fd = 0;
  for (std::size_t i = 0; i < UnheardClients::kMaxOfUser; ++i) EXPECT_TRUE(clients.add(fd++, 1, 0));
  EXPECT_FALSE(clients.add(fd++, 1, 0));
  EXPECT_TRUE(clients.add(fd++, 2, 0));
  clients.remove(0);
  EXPECT_TRUE(clients.add(fd++, 1, 0));
}

TEST(UnheardClients, AllTogetherAreBounded) {
  UnheardClients clients(1000);
  std::size_t n = 0;
  while (clients.add(static_cast<int>(n), static_cast<std::uint32_t>(n), 0)) ++n;
  EXPECT_EQ(n, UnheardClients::kMax);
}

}  // namespace
}  // namespace moecached
