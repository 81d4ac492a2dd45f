#include "client/src/private_slots.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "client/src/error.h"
#include "client/src/resources.h"
#include "client/src/session.h"

namespace moecached::client {
namespace {

constexpr std::uint64_t kStride = 1536;

// Three private slots from id 4 on, behind a shared part of two pages.
class PrivateSlotsTest : public ::testing::Test {
 protected:
  PrivateSlotsTest()
      : memory_(::mmap(nullptr, 4 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4 * 4096) {}

  moecached_status acquire(const std::vector<std::uint16_t>& experts) {
    got_.assign(experts.size(), -1);
    bool read[8] = {};
    const moecached_status status = slots_.acquire(
        experts,
        [this](std::uint32_t expert, std::byte* record) {
          if (expert == broken_) return fail(MOECACHED_E_IO, "broken");
          record[0] = record[kStride - 1] = static_cast<std::byte>(expert);
          reads_.push_back(expert);
          return MOECACHED_OK;
        },
        got_.data(), read);
    return status;
  }
  [[nodiscard]] unsigned content(std::int32_t slot) const {
    return static_cast<unsigned>(memory_.data()[slot * kStride + kStride - 1]);
  }

  Mapping memory_;
  PrivateSlots slots_{{.window = memory_.data(),
                       .slot_stride = kStride,
                       .first_slot = 6,
                       .n_slots = 3,
                       .n_slots_usual = 3,
                       .n_experts = 10,
                       .shared_bytes = 2 * 4096,
                       .private_bytes = 2 * 4096}};
  std::vector<std::int32_t> got_;
  std::vector<std::uint32_t> reads_;
  std::uint32_t broken_ = 99;
};

TEST_F(PrivateSlotsTest, ReadEachExpertOnceWhileItStays) {
  ASSERT_EQ(acquire({7, 8}), MOECACHED_OK);
  EXPECT_EQ(content(got_[0]), 7u);
  EXPECT_EQ(content(got_[1]), 8u);
  slots_.release(got_);
  ASSERT_EQ(acquire({8, 7}), MOECACHED_OK);
  EXPECT_EQ(reads_.size(), 2u);
}

TEST_F(PrivateSlotsTest, EvictTheLeastRecentlyUsed) {
  for (const std::uint16_t expert : std::vector<std::uint16_t>{1, 2, 3, 1}) {
    ASSERT_EQ(acquire({expert}), MOECACHED_OK);
    slots_.release(got_);
  }
  ASSERT_EQ(acquire({4}), MOECACHED_OK);  // 2 has to go
  slots_.release(got_);
  reads_.clear();
  ASSERT_EQ(acquire({1, 3}), MOECACHED_OK);
  EXPECT_TRUE(reads_.empty());
}

TEST_F(PrivateSlotsTest, NeverEvictWhatIsPinned) {
  ASSERT_EQ(acquire({1, 2}), MOECACHED_OK);
  const std::vector<std::int32_t> held = got_;
  for (const std::uint16_t expert : std::vector<std::uint16_t>{3, 4, 5}) {
    ASSERT_EQ(acquire({expert}), MOECACHED_OK);
    slots_.release(got_);
  }
  EXPECT_EQ(content(held[0]), 1u);
  EXPECT_EQ(content(held[1]), 2u);
  EXPECT_EQ(acquire({6, 7}), MOECACHED_E_TOO_MANY);
  slots_.release(held);
  EXPECT_EQ(acquire({6, 7, 8}), MOECACHED_OK) << "the refused call left nothing pinned";
}

TEST_F(PrivateSlotsTest, DoNotTakeASlotOfTheirOwnSet) {
  ASSERT_EQ(acquire({1, 2, 3}), MOECACHED_OK);
  slots_.release(got_);
  ASSERT_EQ(acquire({4, 5, 1}), MOECACHED_OK);  // 1 is the oldest, and wanted
  EXPECT_EQ(content(got_[0]), 4u);
  EXPECT_EQ(content(got_[1]), 5u);
  EXPECT_EQ(content(got_[2]), 1u);
}

TEST_F(PrivateSlotsTest, PinsAreCountedPerUser) {
  ASSERT_EQ(acquire({1}), MOECACHED_OK);
  const std::vector<std::int32_t> first = got_;
  ASSERT_EQ(acquire({1}), MOECACHED_OK);
  slots_.release(got_);
  EXPECT_EQ(acquire({2, 3, 4}), MOECACHED_E_TOO_MANY) << "the first user still holds its slot";
  slots_.release(first);
  EXPECT_EQ(acquire({2, 3, 4}), MOECACHED_OK);
}

TEST_F(PrivateSlotsTest, GrowBeyondTheUsualOnlyWhenAllOfThoseAreInUse) {
  PrivateSlots slots({.window = memory_.data(),
                      .slot_stride = kStride,
                      .first_slot = 6,
                      .n_slots = 4,
                      .n_slots_usual = 2,
                      .n_experts = 10,
                      .shared_bytes = 2 * 4096,
                      .private_bytes = 2 * 4096});
  const PrivateSlots::Read read = [](std::uint32_t, std::byte*) { return MOECACHED_OK; };
  bool was_read[4];
  std::int32_t got[4];
  for (std::uint16_t expert = 0; expert < 6; ++expert) {
    ASSERT_EQ(slots.acquire({&expert, 1}, read, got, was_read), MOECACHED_OK);
    EXPECT_LT(got[0], 6 + 2);
    slots.release({got, 1});
  }
  const std::uint16_t four[] = {6, 7, 8, 9};
  ASSERT_EQ(slots.acquire(four, read, got, was_read), MOECACHED_OK);
  EXPECT_EQ(*std::max_element(got, got + 4), 6 + 3);
}

TEST_F(PrivateSlotsTest, FailedReadLeavesNoTrace) {
  broken_ = 2;
  EXPECT_EQ(acquire({1, 2}), MOECACHED_E_IO);
  broken_ = 99;
  ASSERT_EQ(acquire({2, 3, 4}), MOECACHED_OK) << "nothing stays pinned";
  EXPECT_EQ(content(got_[0]), 2u);
}

TEST(RetryGate, LetsOneAttemptThroughEveryTwoSeconds) {
  RetryGate gate;
  const RetryGate::Time start{};
  EXPECT_TRUE(gate.pass(start));
  EXPECT_FALSE(gate.pass(start + std::chrono::milliseconds(1999)));
  EXPECT_TRUE(gate.pass(start + std::chrono::milliseconds(2000)));
  EXPECT_FALSE(gate.pass(start + std::chrono::milliseconds(3999)));
}

}  // namespace
}  // namespace moecached::client
