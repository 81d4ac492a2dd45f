#include "daemon/tier/region_registry.h"

#include <gtest/gtest.h>

#include <map>

#include "daemon/platform/memfd.h"

namespace moecached {
namespace {

constexpr std::uint64_t kMiB = 1u << 20;

// Remembers what is registered. The addresses are never followed.
class FakeEngine final : public ReadEngine {
 public:
  std::string_view name() const override { return "fake"; }
  std::uint32_t depth_max() const override { return 1; }
  void add_file(std::uint32_t, int, bool) override {}
  void remove_file(std::uint32_t) override {}
  bool can_register_memory() const override { return true; }
  Status register_memory(std::span<std::byte> memory) override {
    if (refuse) return Fault{FaultCode::kSystem, "no"};
    EXPECT_TRUE(registered.emplace(memory.data(), memory.size()).second);
    return ok();
  }
  void unregister_memory(std::span<std::byte> memory) override {
    EXPECT_EQ(registered.erase(memory.data()), 1u);
  }
  void start(const EngineRead&) override {}
  std::size_t wait(std::span<EngineDone>, bool) override { return 0; }
  void wake() override {}

  std::map<std::byte*, std::uint64_t> registered;
  bool refuse = false;
};

class Regions : public testing::Test {
 protected:
  static std::span<std::byte> region(std::uint64_t gib, std::uint64_t n_bytes) {
    return {reinterpret_cast<std::byte*>(gib << 30), n_bytes};
  }
  FakeEngine engine_;
  RegionRegistry registry_{engine_};
};

TEST_F(Regions, NothingIsRegisteredBeforeItWasFilled) {
  const std::span<std::byte> memory = region(1, 100 * kMiB);
  registry_.add(memory);
  for (std::uint64_t mib = 0; mib < 63; ++mib)
    EXPECT_EQ(registry_.note_read(memory.data() + mib * kMiB, kMiB), "");
  EXPECT_TRUE(engine_.registered.empty());
  EXPECT_EQ(registry_.note_read(memory.data() + 63 * kMiB, kMiB), "");
  EXPECT_EQ(engine_.registered, (std::map<std::byte*, std::uint64_t>{{memory.data(), 64 * kMiB}}));
  EXPECT_EQ(registry_.note_read(memory.data(), kMiB), "") << "once is enough";
}

TEST_F(Regions, TheLastChunkIsAsLongAsWhatIsLeft) {
  const std::span<std::byte> memory = region(1, 65 * kMiB);
  registry_.add(memory);
  EXPECT_EQ(registry_.note_read(memory.data() + 64 * kMiB, kMiB), "");
  EXPECT_EQ(engine_.registered, (std::map<std::byte*, std::uint64_t>{{memory.data() + 64 * kMiB, kMiB}}));
}

TEST_F(Regions, ChunksOfAHugeRegionAreFewAndNotMoreThanTheKernelTakes) {
  const std::span<std::byte> memory = region(1024, std::uint64_t{200} << 30);
  registry_.add(memory);
  for (std::uint64_t gib = 0; gib < 200; ++gib)
    (void)registry_.note_read(memory.data() + (gib << 30), 1 << 30);
  EXPECT_FALSE(engine_.registered.empty());
  for (const auto& [begin, n_bytes] : engine_.registered) {
    EXPECT_LE(n_bytes, kRegisterBytesMax);
    EXPECT_GE(n_bytes, (std::uint64_t{200} << 30) / 512);
  }
}

TEST_F(Regions, RemovingUnregistersWhatWasRegisteredAndOnlyThat) {
  const std::span<std::byte> a = region(1, kMiB), b = region(2, kMiB);
  registry_.add(a);
  registry_.add(b);
  EXPECT_EQ(registry_.note_read(a.data(), kMiB), "");
  EXPECT_EQ(registry_.note_read(b.data(), kMiB), "");
  registry_.remove(a);
  EXPECT_EQ(engine_.registered, (std::map<std::byte*, std::uint64_t>{{b.data(), kMiB}}));
  EXPECT_EQ(registry_.note_read(a.data(), kMiB), "") << "no longer known";
  EXPECT_EQ(engine_.registered.size(), 1u);
}

TEST_F(Regions, ARefusalIsReportedOnceAndNotTriedAgainUntilSomethingIsRemoved) {
  const std::span<std::byte> a = region(1, kMiB), b = region(2, kMiB);
  registry_.add(a);
  registry_.add(b);
  engine_.refuse = true;
  EXPECT_EQ(registry_.note_read(a.data(), kMiB), "no");
  EXPECT_TRUE(registry_.refused());
  engine_.refuse = false;
  EXPECT_EQ(registry_.note_read(a.data(), kMiB), "");
  EXPECT_TRUE(engine_.registered.empty());
  registry_.remove(b);
  EXPECT_FALSE(registry_.refused());
  EXPECT_EQ(registry_.note_read(a.data(), kMiB), "");
  EXPECT_EQ(engine_.registered.size(), 1u);
}

// Slots that come and go: the kernel would write into the pages that it pinned, not into those that are
// there.
TEST_F(Regions, MemoryWithTradedSlotsIsNeverRegistered) {
  const std::span<std::byte> memory = region(1, 64 * kMiB);
  registry_.add(memory, {{.offset = 0, .slot_bytes = kMiB, .n_slots = 64}});
  for (int round = 0; round < 3; ++round) {
    for (std::uint64_t mib = 0; mib < 64; ++mib)
      EXPECT_EQ(registry_.note_read(memory.data() + mib * kMiB, kMiB), "");
  }
  EXPECT_TRUE(engine_.registered.empty());
  EXPECT_FALSE(registry_.refused());
  registry_.remove(memory);
}

TEST_F(Regions, HugePagesOfTradedSlotsLieWithinOneSlotAndComeAgainAfterARelease) {
  auto memory = Memfd::create("traded", 8 * kHugePageBytes, ClientAccess::kReadOnlyReleasable);
  ASSERT_TRUE(memory) << memory.error().text;
  // Two windows; slots of one and a half extents: of the first window slot 0 holds extent 0, slot 1 extent 2.
  const std::uint64_t slot_bytes = kHugePageBytes * 3 / 2;
  registry_.add(memory->bytes(), {{.offset = 0, .slot_bytes = slot_bytes, .n_slots = 2},
                                  {.offset = 4 * kHugePageBytes, .slot_bytes = slot_bytes, .n_slots = 2}});
  std::byte* const slot1 = memory->bytes().data() + slot_bytes;
  const std::string refused = registry_.prepare(slot1, slot_bytes);
  if (!refused.empty()) GTEST_SKIP() << refused;
  if (memory->bytes_backed() == 0) GTEST_SKIP() << "no huge page to be had";
  EXPECT_EQ(memory->bytes_backed(), kHugePageBytes);
  EXPECT_EQ(registry_.prepare(memory->bytes().data() + 3 * kHugePageBytes, kHugePageBytes), "");
  EXPECT_EQ(memory->bytes_backed(), kHugePageBytes) << "between two windows";
  ASSERT_TRUE(memory->release(slot_bytes, slot_bytes));
  registry_.released({slot1, slot_bytes});
  EXPECT_EQ(memory->bytes_backed(), 0u);
  EXPECT_EQ(registry_.prepare(slot1, slot_bytes), "");
  EXPECT_EQ(memory->bytes_backed(), kHugePageBytes);
  registry_.remove(memory->bytes());
}

}  // namespace
}  // namespace moecached
