#include "daemon/tier/read_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace moecached {
namespace {

constexpr std::uint32_t kAlignment = 512;

// Block-aligned memory that segments point into.
class ReadPlan : public testing::Test {
 protected:
  static constexpr std::size_t kArenaBytes = 512u << 10;
  std::byte* at(std::size_t offset) { return arena_.get() + offset; }

  Segment segment(std::uint64_t offset, std::uint64_t n_bytes, std::byte* destination, bool direct) {
    Segment s;
    s.order = static_cast<std::uint32_t>(segments_.size());
    s.offset = offset;
    s.bytes = n_bytes;
    s.destination = destination;
    s.direct = direct;
    return s;
  }
  void want(std::uint64_t offset, std::uint64_t n_bytes, std::byte* destination, bool direct = false) {
    segments_.push_back(segment(offset, n_bytes, destination, direct));
  }

  std::vector<PlannedRead> plan(std::uint64_t read_bytes_max = 64u << 10) {
    std::vector<std::uint32_t> batch(segments_.size());
    std::iota(batch.begin(), batch.end(), 0u);
    std::vector<moecached::Run> runs;
    plan_runs(segments_, batch, alignments_, runs);
    std::vector<PlannedRead> reads;
    for (moecached::Run& run : runs) {
      while (run.begin < run.end) reads.push_back(take_read(run, segments_, read_bytes_max));
    }
    return reads;
  }

  std::unique_ptr<std::byte, decltype(&std::free)> arena_{
      static_cast<std::byte*>(std::aligned_alloc(4096, kArenaBytes)), &std::free};
  std::vector<Segment> segments_;
  std::vector<std::uint32_t> alignments_{kAlignment, kAlignment, 1};
};

TEST_F(ReadPlan, ADirectSegmentStartsEarlyAndEndsLateInPlace) {
  want(1000, 2000, at(4096 + 1000 % kAlignment), true);
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].offset, 512u);
  EXPECT_EQ(reads[0].bytes, 2560u);
  EXPECT_EQ(reads[0].memory, at(4096));
  EXPECT_EQ(reads[0].wanted_begin, 1000u);
  EXPECT_EQ(reads[0].wanted_end, 3000u);
}

TEST_F(ReadPlan, ADirectSegmentThatLiesElsewhereWithinItsBlockIsStaged) {
  want(1000, 2000, at(4096), true);
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].memory, nullptr);
}

TEST_F(ReadPlan, ASegmentThatMayNotBePaddedIsReadInPlaceOnlyWhenItNeedsNone) {
  want(1024, 2048, at(8192));
  want(10240, 2000, at(16384));
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 2u);
  EXPECT_EQ(reads[0].memory, at(8192));
  EXPECT_EQ(reads[1].memory, nullptr);
}

TEST_F(ReadPlan, NeighboursInTheFileBecomeOneStagedRead) {
  want(100, 50, at(0));
  want(200, 50, at(300));
  want(150, 50, at(7));
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].n_segments, 3u);
  EXPECT_EQ(reads[0].bytes, 512u);
}

TEST_F(ReadPlan, SegmentsOfOneBlockOrOfTouchingBlocksShareAReadDespiteAGap) {
  want(100, 50, at(0));
  want(400, 200, at(1000));
  want(1024 + 5, 10, at(2000));
  EXPECT_EQ(plan().size(), 1u);
  want(4096, 10, at(3000));
  EXPECT_EQ(plan().size(), 2u) << "blocks between that nobody wants are not read";
}

TEST_F(ReadPlan, NeighboursWithNeighbouringDestinationsBecomeOneReadInPlace) {
  want(1000, 500, at(4096 + 488), true);
  want(1500, 700, at(4096 + 988), true);
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].memory, at(4096));
  EXPECT_EQ(reads[0].n_segments, 2u);
}

TEST_F(ReadPlan, NeighboursInTheFileThatGoToDifferentPlacesInPlaceStayTwoReads) {
  want(1000, 500, at(4096 + 488), true);
  want(1500, 700, at(16384 + 476), true);
  EXPECT_EQ(plan().size(), 2u);
}

TEST_F(ReadPlan, FilesAreNeverMixed) {
  want(0, 512, at(0));
  want(512, 512, at(512));
  segments_[1].file = 1;
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 2u);
  EXPECT_NE(reads[0].file, reads[1].file);
}

TEST_F(ReadPlan, LongRangesAreCutAtBlocks) {
  want(100, 10'000, at(4096 + 100), true);
  const std::vector<PlannedRead> reads = plan(4096);
  ASSERT_EQ(reads.size(), 3u);
  EXPECT_EQ(reads[0].offset, 0u);
  EXPECT_EQ(reads[0].bytes, 4096u);
  EXPECT_EQ(reads[1].offset, 4096u);
  EXPECT_EQ(reads[1].memory, at(4096 + 4096));
  EXPECT_EQ(reads[2].bytes, 2048u);
  EXPECT_EQ(reads[2].wanted_end, 10'100u);
}

TEST_F(ReadPlan, BufferedFilesAreReadExactlyAndInPlace) {
  want(101, 203, at(7));
  segments_[0].file = 2;
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].offset, 101u);
  EXPECT_EQ(reads[0].bytes, 203u);
  EXPECT_EQ(reads[0].memory, at(7));
}

TEST_F(ReadPlan, WhatCameFirstIsReadFirst) {
  want(50'000, 100, at(0));
  want(10'000, 100, at(1000));
  want(90'000, 100, at(2000));
  const std::vector<PlannedRead> reads = plan();
  ASSERT_EQ(reads.size(), 3u);
  EXPECT_EQ(reads[0].wanted_begin, 50'000u);
  EXPECT_EQ(reads[1].wanted_begin, 10'000u);
  EXPECT_EQ(reads[2].wanted_begin, 90'000u);
}

TEST_F(ReadPlan, AReadCanBeTakenApartIntoItsSegments) {
  want(100, 50, at(0));
  want(150, 2000, at(300));
  want(2150, 50, at(3000));
  const std::vector<PlannedRead> reads = plan(1024);
  ASSERT_EQ(reads.size(), 3u);
  ASSERT_EQ(reads[0].n_segments, 2u);
  std::uint64_t n_covered = 0;
  std::uint32_t index = reads[0].first_segment;
  for (std::uint32_t i = 0; i < reads[0].n_segments; ++i, index = segments_[index].next) {
    moecached::Run run = run_of_one(reads[0], segments_, index);
    while (run.begin < run.end) {
      const PlannedRead read = take_read(run, segments_, 1024);
      EXPECT_EQ(read.n_segments, 1u);
      EXPECT_EQ(read.first_segment, index);
      n_covered += read.wanted_end - read.wanted_begin;
    }
  }
  EXPECT_EQ(n_covered, reads[0].wanted_end - reads[0].wanted_begin);
}

// Plays random plans against a file whose bytes are a function of their offset. `direct` destinations have
// blocks of their own, as slots have; the others are packed without a gap, so that a byte too many shows.
class RandomReadPlan : public ReadPlan, public testing::WithParamInterface<int> {
 protected:
  static constexpr std::size_t kFileBytesMax = 64u << 10;
  // Never 0, so that a byte which did not come shows; long enough for padding behind the end.
  static std::vector<std::vector<std::uint8_t>> make_files() {
    std::mt19937_64 random(5);
    std::vector<std::vector<std::uint8_t>> files(3, std::vector<std::uint8_t>(kFileBytesMax + kAlignment));
    for (std::vector<std::uint8_t>& file : files) {
      for (std::size_t i = 0; i < file.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = random() | 0x0101010101010101;
        std::memcpy(file.data() + i, &word, sizeof word);
      }
    }
    return files;
  }
};

TEST_P(RandomReadPlan, CoversEveryWantedByteOnceAndWritesNoOther) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  const auto below = [&](std::uint64_t n) { return random() % n; };
  std::memset(arena_.get(), 0, kArenaBytes);
  std::vector<char> may_write(kArenaBytes, 0);
  const auto allow = [&](std::size_t begin, std::size_t end) {
    std::memset(may_write.data() + begin, 1, end - begin);
  };
  static const std::vector<std::vector<std::uint8_t>> files = make_files();
  std::size_t used = 0;
  const std::uint64_t file_bytes = 1 + below(60'000);  // small, so that neighbours and overlaps are common
  const std::uint64_t n_segments = 1 + below(60);
  for (std::uint64_t i = 0; i < n_segments; ++i) {
    Segment s = segment(below(file_bytes), 0, nullptr, below(2) == 0);
    if (i > 0 && below(3) == 0) s.offset = std::min(segments_.back().end(), file_bytes - 1);  // a neighbour
    s.file = i > 0 && below(2) == 0 ? segments_.back().file : static_cast<std::uint32_t>(below(3));
    s.bytes = 1 + below(std::min<std::uint64_t>(file_bytes - s.offset, below(4) == 0 ? 20'000 : 1500));
    const Segment* const before = i > 0 ? &segments_.back() : nullptr;
    const bool behind = before != nullptr && below(3) == 0 && before->file == s.file &&
                        before->end() == s.offset && before->direct == s.direct;
    if (s.direct && alignments_[s.file] > 1) {
      if (behind) {  // goes on in memory as it does in the file
        s.destination = before->destination + before->bytes;
      } else {
        used = align_up(used, kAlignment) + (below(4) == 0 ? below(kAlignment) : s.offset % kAlignment);
        s.destination = at(used);
      }
      used = static_cast<std::size_t>(s.destination - arena_.get()) + s.bytes;
      const std::size_t begin =
          align_down(static_cast<std::size_t>(s.destination - arena_.get()), kAlignment);
      used = align_up(used, kAlignment);
      allow(begin, used);
    } else {
      s.destination = at(used);
      allow(used, used + s.bytes);
      used += s.bytes;
    }
    ASSERT_LT(used + kAlignment, kArenaBytes);
    segments_.push_back(s);
  }

  const std::uint64_t read_bytes_max = kAlignment << below(8);
  std::vector<std::uint64_t> n_covered(segments_.size(), 0);
  for (const PlannedRead& read : plan(read_bytes_max)) {
    const std::uint32_t alignment = alignments_[read.file];
    ASSERT_GT(read.bytes, 0u);
    ASSERT_LE(read.bytes, read_bytes_max);
    ASSERT_EQ(read.offset % alignment, 0u);
    ASSERT_EQ(read.bytes % alignment, 0u);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(read.memory) % alignment, 0u);
    ASSERT_LE(read.offset, read.wanted_begin);
    ASSERT_LT(read.wanted_begin, read.wanted_end);
    ASSERT_LE(read.wanted_end, read.offset + read.bytes);
    const auto staging = std::make_unique_for_overwrite<std::byte[]>(read.bytes);
    std::byte* const memory = read.memory != nullptr ? read.memory : staging.get();
    if (read.memory != nullptr) {
      const char* const allowed = may_write.data() + (read.memory - arena_.get());
      ASSERT_EQ(std::memchr(allowed, 0, read.bytes), nullptr) << "a byte that nobody gave away";
    }
    std::memcpy(memory, files[read.file].data() + read.offset, read.bytes);
    std::uint32_t index = read.first_segment;
    for (std::uint32_t i = 0; i < read.n_segments; ++i) {
      if (i > 0) index = segments_[index].next;
      const Segment& s = segments_[index];
      ASSERT_EQ(s.file, read.file);
      const std::uint64_t begin = std::max(s.offset, read.wanted_begin),
                          end = std::min(s.end(), read.wanted_end);
      ASSERT_LT(begin, end) << "a segment that wants nothing of this read";
      n_covered[index] += end - begin;
      if (read.memory == nullptr) {
        std::copy_n(memory + (begin - read.offset), end - begin, s.destination + (begin - s.offset));
      } else {
        ASSERT_EQ(read.memory + (begin - read.offset), s.destination + (begin - s.offset));
      }
    }
  }
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& s = segments_[i];
    ASSERT_EQ(n_covered[i], s.bytes) << "segment " << i;
    ASSERT_EQ(std::memcmp(s.destination, files[s.file].data() + s.offset, s.bytes), 0) << "segment " << i;
  }
  const std::vector<char> zeroes(kArenaBytes, 0);
  for (std::size_t begin = 0; begin < kArenaBytes;) {  // over stretches that are nobody's
    const void* const end_or_null = std::memchr(may_write.data() + begin, 1, kArenaBytes - begin);
    const std::size_t end =
        end_or_null == nullptr
            ? kArenaBytes
            : static_cast<std::size_t>(static_cast<const char*>(end_or_null) - may_write.data());
    ASSERT_TRUE(begin == end || std::memcmp(arena_.get() + begin, zeroes.data(), end - begin) == 0)
        << "before byte " << end;
    const void* const next_or_null = std::memchr(may_write.data() + end, 0, kArenaBytes - end);
    if (next_or_null == nullptr) break;
    begin = static_cast<std::size_t>(static_cast<const char*>(next_or_null) - may_write.data());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomReadPlan, testing::Range(1, 201));

}  // namespace
}  // namespace moecached
