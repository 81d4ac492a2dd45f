// Graphs that wait on the GPU, against the real daemon. What they read under moves: spill_daemon_test.cc.
#include "tests/integration/spill_fixture.h"

namespace moecached {
namespace {

TEST_F(SpillDaemonTest, AWaitingGraphIsAnsweredWhenTheDaemonGoes) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kTopK);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  const auto outcome =
      client.waiting_graph({{{0, 1, 2, 3}, {4, 9, 14, 15}, {5, 10, 11, 13}}}, [&](std::uint32_t layer) {
        if (layer == 0) daemon_.reset();
      });
  EXPECT_EQ(outcome.wrong, 0u);
  EXPECT_EQ(outcome.waited, 1u);
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.fallback_reads, 0u) << "it had all that it needed, which shows nothing";
  const auto behind = client.tokens(1, 20, 3);
  EXPECT_EQ(behind.wrong, 0u);
  EXPECT_EQ(behind.waited, 0u) << "without a daemon graphs are cut";
}

TEST_F(SpillDaemonTest, AWaitForMoreExpertsThanCanBeLeasedReadsThemFromTheFile) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kRamSlots + 2);  // the daemon has taken slots away since the graph was begun
  const std::vector<std::int32_t> many = {0, 2, 4, 6, 8, 10, 12, 6}, few = {1, 3};
  const auto outcome = client.waiting_graph({{few, many, few}});
  EXPECT_EQ(outcome.wrong, 0u);
  EXPECT_EQ(outcome.slots, many.size() + 2 * few.size());
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_EQ(counters.fallback_reads, 7u);
}

TEST_F(SpillDaemonTest, WaitsThatNeverComeEndWithTheGraph) {
  start_spill();
  SpillClient client(folder_, model_);
  ASSERT_EQ(moecached_spill_waits_reserve(client.lane(), kTopK), MOECACHED_OK) << moecached_last_error();
  const std::uint32_t layers[] = {0, 1, 2};
  ASSERT_EQ(moecached_spill_waits_begin(client.lane(), layers, 3, kTopK, kTopK), MOECACHED_OK)
      << moecached_last_error();
  EXPECT_EQ(moecached_spill_waits_end(client.lane()), MOECACHED_E_SYSTEM) << "its launch failed";
  EXPECT_NE(std::string(moecached_last_error()).find("has not asked"), std::string::npos)
      << moecached_last_error();
  client.use_waits(kTopK);
  EXPECT_EQ(client.tokens(1, 20, 0).wrong, 0u);
}

TEST_F(SpillDaemonTest, AFailureIsToldAtTheEndOfTheGraphAndEveryLayerIsAnswered) {
  start_spill();
  SpillClient client(folder_, model_);
  client.use_waits(kTopK);
  const std::uint32_t layers[] = {0, 1};
  ASSERT_EQ(moecached_spill_waits_begin(client.lane(), layers, 2, kTopK, kTopK), MOECACHED_OK)
      << moecached_last_error();
  std::int32_t ids[] = {3, -1}, slots[] = {-1, -1};
  for (const std::uint32_t layer : layers) {
    const moecached_spill_wait wait{&ids, reinterpret_cast<std::uint64_t>(ids),
                                    reinterpret_cast<std::uint64_t>(slots), 2, layer};
    ASSERT_EQ(moecached_spill_wait_enqueue(client.lane(), &wait), MOECACHED_OK);
    EXPECT_EQ(slots[0], 0) << "the graph computes on, within memory that is there";
    ids[1] = 0;
  }
  EXPECT_EQ(moecached_spill_waits_end(client.lane()), MOECACHED_E_ARGUMENT);
  EXPECT_NE(std::string(moecached_last_error()).find("expert id"), std::string::npos)
      << moecached_last_error();
  EXPECT_EQ(client.tokens(1, 20, 0).wrong, 0u);
}

TEST_F(SpillDaemonTest, WaitsAreRefusedWhereThereIsNoRoomForThem) {
  start_spill();
  SpillClient client(folder_, model_);
  EXPECT_EQ(moecached_spill_waits_reserve(client.lane(), 65), MOECACHED_E_TOO_MANY);
  const std::uint32_t layer = kLayers;
  EXPECT_EQ(moecached_spill_waits_begin(client.lane(), &layer, 1, kTopK, kTopK), MOECACHED_E_ARGUMENT);
  const std::uint32_t layers[] = {0, 1, 2};
  ASSERT_EQ(moecached_spill_waits_reserve(client.lane(), kRamSlots + 1), MOECACHED_OK);
  EXPECT_EQ(moecached_spill_waits_begin(client.lane(), layers, 3, kRamSlots + 1, kRamSlots + 1),
            MOECACHED_E_TOO_MANY)
      << "a layer has no slots for as many";
  EXPECT_EQ(client.tokens(1, 5, 0).wrong, 0u);
  std::int32_t ids[kRamSlots + 2] = {}, slots[kRamSlots + 2] = {};
  const moecached_spill_wait wait{&ids, reinterpret_cast<std::uint64_t>(ids),
                                  reinterpret_cast<std::uint64_t>(slots), kRamSlots + 2, 0};
  EXPECT_EQ(moecached_spill_wait_enqueue(client.lane(), &wait), MOECACHED_E_ARGUMENT)
      << "more ids than were reserved";
}

}  // namespace
}  // namespace moecached
