// Stray writes into a pool: found within one period, reported, and read again from the file; and nothing is
// reported where there are none, however fast slots change.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>

#include "tests/integration/client_daemon_fixture.h"

namespace moecached {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class ScrubTest : public ClientDaemonTest {
 protected:
  static constexpr milliseconds kPeriod{400};

  void SetUp() override {
    ClientDaemonTest::SetUp();
    restart(kPeriod);
  }
  void restart(milliseconds period, std::uint32_t slots = 6) {
    daemon_.reset();
    Config config;
    config.handle_socket = folder_ / "handle.sock";
    config.control_socket = folder_ / "control.sock";
    config.pool_bytes = 64u << 20;
    config.slots = {.kind = SlotsSpec::Kind::kCount, .value = static_cast<double>(slots)};
    config.scrub_period_ms = static_cast<std::uint64_t>(period.count());
    config.scrub_bytes_per_second = 0;
    auto daemon = Daemon::start(config);
    ASSERT_TRUE(daemon) << daemon.error().text;
    daemon_ = *std::move(daemon);
  }
  [[nodiscard]] ModelReport report() { return daemon_->models().front(); }
  [[nodiscard]] std::uint64_t corrupt() { return report().slots_corrupt; }
  void wait_until(const std::function<bool()>& condition, milliseconds at_most = milliseconds(20'000)) {
    const auto end = std::chrono::steady_clock::now() + at_most;
    while (!condition() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(milliseconds(1));
    ASSERT_TRUE(condition());
  }
  // Every slot has been visited: what comes now is compared with checksums.
  void wait_for_a_round() {
    const std::uint64_t before = report().slots_checked;
    std::uint64_t resident = 0;
    for (const LayerReport& layer : report().layers) resident += layer.resident;
    wait_until([&] { return report().slots_checked >= before + 2 * resident; });
  }
  [[nodiscard]] std::string errors() {
    std::string text;
    for (const Finding& finding : daemon_->doctor()) {
      if (finding.severity == "error") text += finding.subject + ": " + finding.text + "\n";
    }
    return text;
  }
  // Nothing orders it with what the daemon does, and ThreadSanitizer need not say so.
  __attribute__((no_sanitize("thread"))) static void stray_write(std::byte* at, unsigned char bits) {
    *reinterpret_cast<unsigned char*>(at) ^= bits;
  }
  // The daemon's own mapping of its pool, which alone is writable: where a stray pointer of its process would
  // hit.
  static std::byte* pool() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      unsigned long begin = 0;
      if (line.find("moecached-pool") == std::string::npos || line.find(" rw-s ") == std::string::npos)
        continue;
      if (std::sscanf(line.c_str(), "%lx-", &begin) == 1) return reinterpret_cast<std::byte*>(begin);
    }
    ADD_FAILURE() << "no pool is mapped";
    return nullptr;
  }
};

// Of layer 0, whose window begins where the pool does.
struct Resolved {
  std::int32_t id = 0, slot = -1;
};
Resolved resolve(Client& client, std::int32_t id) {
  Resolved out{.id = id};
  EXPECT_EQ(moecached_lane_resolve(client.lane(), 0, &id, 1, 1, 0, &out.slot), MOECACHED_OK)
      << moecached_last_error();
  return out;
}
std::uint64_t last_byte_of(Client& client, const Resolved& resolved) {
  moecached_layer_info layer{};
  EXPECT_EQ(moecached_model_layer(client.model(), 0, &layer), MOECACHED_OK);
  moecached_part_info part{};
  EXPECT_EQ(moecached_model_part(client.model(), 0, layer.n_parts - 1, &part), MOECACHED_OK);
  return static_cast<std::uint64_t>(resolved.slot) * layer.slot_stride + part.slot_offset +
         part.expert_bytes - 1;
}

TEST_F(ScrubTest, AStrayByteIsFoundWithinOnePeriodAndReadAgain) {
  Client client(folder_, model_);
  // Before the slot is first visited, and when its checksum is known.
  for (const bool is_known : {false, true}) {
    const Resolved resolved = resolve(client, is_known ? 3 : 5);
    moecached_lane_end(client.lane());
    if (is_known) wait_for_a_round();
    const std::uint64_t before = corrupt();
    stray_write(pool() + last_byte_of(client, resolved), 0x01);
    const auto written = std::chrono::steady_clock::now();
    EXPECT_EQ(client.wrong_bytes(0, resolved.id, resolved.slot), 1u) << "the byte is one that is compared";
    wait_until([&] { return corrupt() > before; });
    const auto took = std::chrono::steady_clock::now() - written;
    std::printf("found after %.0f ms of %ld\n", std::chrono::duration<double, std::milli>(took).count(),
                static_cast<long>(kPeriod.count()));
    EXPECT_LT(took, kPeriod + milliseconds(200)) << "a busy machine gets some more";
    const Resolved again = resolve(client, resolved.id);
    EXPECT_EQ(client.wrong_bytes(0, again.id, again.slot), 0u);
    moecached_lane_end(client.lane());
    EXPECT_THAT(errors(),
                HasSubstr("layer 0, expert " + std::to_string(resolved.id) + " in slot " +
                          std::to_string(resolved.slot) + " did not hold the bytes of the file at 20"));
    EXPECT_THAT(errors(), HasSubstr("may be wrong and cannot be mended"));
    wait_for_a_round();
    EXPECT_EQ(corrupt(), before + 1) << "it is right again";
  }
}

// The lane was promised that it stays; others must not get it, and it must come right as soon as it may.
TEST_F(ScrubTest, WhatALeasePinsIsReadAgainWhenTheLeaseEnds) {
  Client client(folder_, model_);
  const Resolved resolved = resolve(client, 7);  // a miss: the lease lasts until the epoch ends
  stray_write(pool() + last_byte_of(client, resolved), 0x80);
  wait_until([&] { return corrupt() == 1; });
  EXPECT_THAT(errors(), HasSubstr("A lease or a stopped client keeps it"));
  EXPECT_EQ(client.wrong_bytes(0, resolved.id, resolved.slot), 1u);
  moecached_lane_end(client.lane());
  wait_until([&] { return client.wrong_bytes(0, resolved.id, resolved.slot) == 0; });
  EXPECT_THAT(errors(), HasSubstr("It was taken out and is read again"));
  EXPECT_EQ(corrupt(), 1u) << "found once, however long it was kept";
}

TEST_F(ScrubTest, AFileThatReadsDifferentlyIsNotTakenForAStrayWrite) {
  Client client(folder_, model_);
  const Resolved resolved = resolve(client, 2);
  moecached_lane_end(client.lane());
  wait_for_a_round();
  moecached_part_info part{};
  ASSERT_EQ(moecached_model_part(client.model(), 0, 0, &part), MOECACHED_OK);
  std::uint64_t offset = 0;
  std::uint32_t file = 0;
  ASSERT_EQ(moecached_model_locate(client.model(), 0, 0, 2, &file, &offset), MOECACHED_OK);
  struct stat status {};
  ASSERT_EQ(::stat(model_.c_str(), &status), 0);
  {
    const int fd = ::open(model_.c_str(), O_RDWR | O_CLOEXEC);
    const char other = 0x55;
    ASSERT_EQ(::pwrite(fd, &other, 1, static_cast<off_t>(offset)), 1);
    const timespec times[] = {status.st_atim, status.st_mtim};  // so that its identity stays
    ASSERT_EQ(::futimens(fd, times), 0);
    ::close(fd);
  }
  stray_write(pool() + last_byte_of(client, resolved), 0x01);
  wait_until([&] { return report().changed_on_disk; });
  EXPECT_EQ(corrupt(), 0u);
  EXPECT_THAT(errors(), HasSubstr("two reads of its file gave different bytes"));
}

TEST_F(ScrubTest, NothingIsReportedHoweverFastSlotsChange) {
  restart(milliseconds(20), 5);  // one more than a token needs: nearly every lookup misses
  constexpr int kLanes = 3;
  std::atomic<std::size_t> wrong{0};
  std::atomic<int> running{kLanes};
  std::vector<std::thread> threads;
  for (int i = 0; i < kLanes; ++i) {
    threads.emplace_back([&, i] {
      Client client(folder_, model_);
      wrong += client.decode(static_cast<std::uint32_t>(i), 1500);
      --running;
    });
  }
  for (int i = 0; running > 0; ++i) {
    ASSERT_TRUE(daemon_->set_policy({}, i % 2 == 0 ? "lru" : "slru"));
    std::this_thread::sleep_for(milliseconds(5));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  std::uint64_t evictions = 0;
  for (const LayerReport& layer : report().layers) evictions += layer.evictions;
  std::printf("%llu evictions, %llu slots compared, %llu wrong\n", static_cast<unsigned long long>(evictions),
              static_cast<unsigned long long>(report().slots_checked),
              static_cast<unsigned long long>(corrupt()));
  EXPECT_GT(evictions, 1000u);
  EXPECT_GT(report().slots_checked, 200u);
  EXPECT_EQ(corrupt(), 0u);
  EXPECT_EQ(errors(), "");
}

TEST_F(ScrubTest, ARateBelowWhatThePeriodNeedsStretchesTheRound) {
  daemon_.reset();
  Config config;
  config.handle_socket = folder_ / "handle.sock";
  config.pool_bytes = 64u << 20;
  config.slots = {.kind = SlotsSpec::Kind::kPercent, .value = 100};
  config.scrub_period_ms = 100;
  config.scrub_bytes_per_second = 256u << 10;
  auto daemon = Daemon::start(config);
  ASSERT_TRUE(daemon) << daemon.error().text;
  daemon_ = *std::move(daemon);
  Client client(folder_, model_);
  EXPECT_EQ(client.decode(1, 20), 0u);
  const auto begin = std::chrono::steady_clock::now();
  const std::uint64_t before = report().slots_checked;
  wait_until([&] { return report().slots_checked >= before + 5; });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::uint64_t bytes = 4 * report().layers[0].slot_bytes;  // the fifth may have been under way
  EXPECT_LT(static_cast<double>(bytes) / seconds, 2 * 256e3)
      << "twice: the first of a slot reads the file as well";
}

}  // namespace
}  // namespace moecached
