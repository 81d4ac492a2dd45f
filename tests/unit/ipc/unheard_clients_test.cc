#include "daemon/ipc/unheard_clients.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

TEST(UnheardClients, OneThatSpeaksIsNotCutAndOneThatDoesNotIs) {
  UnheardClients clients(1000);
  EXPECT_EQ(clients.wait_ms(0, false), -1);
  clients.add(5, 1, 0);
  clients.add(6, 1, 300);
  EXPECT_EQ(clients.wait_ms(400, false), 600);
  EXPECT_EQ(clients.expired(999), std::vector<int>{});
  EXPECT_EQ(clients.expired(1000), std::vector<int>{5});
  EXPECT_EQ(clients.expired(1300), (std::vector<int>{5, 6}));
  EXPECT_TRUE(clients.contains(5));
  clients.remove(5);
  EXPECT_FALSE(clients.contains(5));
  EXPECT_EQ(clients.expired(1000), std::vector<int>{});
  EXPECT_EQ(clients.wait_ms(1000, false), 300);
  clients.remove(6);
  EXPECT_EQ(clients.expired(100000), std::vector<int>{});
  EXPECT_EQ(clients.wait_ms(100000, false), -1);
}

// 32 of them: `others` of users of their own, the first ones, and else of user 1.
UnheardClients crowd(std::size_t others) {
  UnheardClients clients(1000);
  for (std::size_t i = 0; i < UnheardClients::kMax; ++i) {
    EXPECT_FALSE(clients.full());
    clients.add(static_cast<int>(i), i < others ? static_cast<std::uint32_t>(100 + i) : 1, i);
  }
  EXPECT_TRUE(clients.full());
  return clients;
}

TEST(UnheardClients, TheUserWithMostOfThemMakesRoom) {
  UnheardClients clients = crowd(3);
  const std::uint64_t later = 3 + UnheardClients::kYoungMs;
  EXPECT_EQ(clients.in_the_way(later), 3) << "the first of user 1, not the first of all";
  clients.remove(3);
  EXPECT_EQ(clients.in_the_way(later), -1) << "there is room";
  clients.add(50, 2, later);
  EXPECT_EQ(clients.in_the_way(later + 1), 4);
}

TEST(UnheardClients, WhoCameJustNowMakesNoRoom) {
  const UnheardClients clients = crowd(0);
  EXPECT_EQ(clients.in_the_way(UnheardClients::kYoungMs - 1), -1);
  EXPECT_EQ(clients.wait_ms(UnheardClients::kYoungMs - 1, true), 1);
  EXPECT_EQ(clients.in_the_way(UnheardClients::kYoungMs), 0);
  EXPECT_EQ(clients.wait_ms(UnheardClients::kYoungMs, true), 0);
  EXPECT_EQ(clients.wait_ms(UnheardClients::kYoungMs, false), 500) << "nobody waits for the room";
}

TEST(UnheardClients, OfOneForEachUserTheFirstMakesRoom) {
  EXPECT_EQ(crowd(UnheardClients::kMax).in_the_way(UnheardClients::kYoungMs), 0);
}

}  // namespace
}  // namespace moecached
