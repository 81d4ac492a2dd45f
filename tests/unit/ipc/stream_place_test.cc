// Where streamed experts lie in their half: proto/shm/stream_place.h.
#include "proto/shm/stream_place.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace moecached {
namespace {

constexpr std::uint64_t kPage = MOECACHED_STREAM_PAGE;

TEST(StreamPlace, NeighboursInTheFileAreNeighboursInTheHalf) {
  moecached_stream_end end{};
  EXPECT_EQ(moecached_stream_place(&end, 0, 5 * kPage + 100, 3000), 100u);
  EXPECT_EQ(moecached_stream_place(&end, 0, 5 * kPage + 3100, 3000), 3100u);
  EXPECT_EQ(moecached_stream_place(&end, 0, 5 * kPage + 6100, 3000), 6100u);
  EXPECT_EQ(moecached_stream_bytes(end), 3 * kPage);
}

TEST(StreamPlace, OthersBeginInAPageOfTheirOwnWithThePhaseOfTheFile) {
  moecached_stream_end end{};
  EXPECT_EQ(moecached_stream_place(&end, 0, 7, 10), 7u);
  EXPECT_EQ(moecached_stream_place(&end, 0, 20, 10), kPage + 20) << "three bytes behind the one before";
  EXPECT_EQ(moecached_stream_place(&end, 0, 7, 10), 2 * kPage + 7) << "before it";
  EXPECT_EQ(moecached_stream_place(&end, 1, 17, 10), 3 * kPage + 17) << "in another file";
  EXPECT_EQ(moecached_stream_bytes(end), 4 * kPage);
}

TEST(StreamPlace, NothingPlacedTakesNothingAndIsNoNeighbourOfTheFilesBegin) {
  moecached_stream_end end{};
  EXPECT_EQ(moecached_stream_bytes(end), 0u);
  EXPECT_EQ(moecached_stream_place(&end, 0, 0, kPage), 0u);
  EXPECT_EQ(moecached_stream_bytes(end), kPage);
}

TEST(StreamPlace, AnExpertAndAPageHoldTheExpertWhereverItBegins) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, kPage - 1, kPage, kPage + 1, 5 * kPage + 17}) {
    const std::uint64_t half = (bytes + kPage - 1) / kPage * kPage + kPage;
    for (std::uint64_t phase = 0; phase < kPage; ++phase) {
      moecached_stream_end end{};
      (void)moecached_stream_place(&end, 0, phase, bytes);
      ASSERT_LE(moecached_stream_bytes(end), half) << bytes << " bytes at " << phase;
    }
  }
}

// What a direct read brings beside the experts that it is for.
TEST(StreamPlace, AReadWidenedToPagesTouchesNoExpertButItsOwn) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t expert_bytes = 1 + random() % (3 * kPage);
    const std::uint64_t first = random() % (2 * kPage);
    struct Placed {
      std::uint64_t begin, end, offset;
    };
    std::vector<Placed> runs;  // neighbours together
    moecached_stream_end end{};
    for (std::uint64_t expert = 0; expert < 64; ++expert) {
      if (random() % 2 == 0) continue;
      const std::uint64_t offset = first + expert * expert_bytes;
      const std::uint64_t at = moecached_stream_place(&end, 0, offset, expert_bytes);
      ASSERT_EQ(at % kPage, offset % kPage);
      if (!runs.empty() && runs.back().offset + (runs.back().end - runs.back().begin) == offset) {
        ASSERT_EQ(at, runs.back().end);
        runs.back().end += expert_bytes;
      } else {
        runs.push_back({at, at + expert_bytes, offset});
      }
    }
    for (std::size_t i = 1; i < runs.size(); ++i) {
      ASSERT_LE((runs[i - 1].end + kPage - 1) / kPage, runs[i].begin / kPage) << "pages of two runs";
    }
    if (!runs.empty()) {
      ASSERT_GE(moecached_stream_bytes(end), runs.back().end);
    }
  }
}

}  // namespace
}  // namespace moecached
