#include "shim/ggml/mapped_ranges.h"

#include <gtest/gtest.h>

namespace moecached::shim {
namespace {

constexpr uintptr_t kBase = 0x10000;

std::shared_ptr<const std::vector<ByteRange>> ranges(std::vector<ByteRange> list) {
  return std::make_shared<const std::vector<ByteRange>>(std::move(list));
}

MappedRanges one_mapping() {
  MappedRanges mapped;
  mapped.add(kBase, 1000, 0, ranges({{0, 100}, {300, 400}, {900, 1000}}));
  return mapped;
}

TEST(MappedRanges, TranslatesFileRangesToAddresses) {
  EXPECT_EQ(one_mapping().wanted_in(kBase, 1000),
            (std::vector<ByteRange>{
                {kBase, kBase + 100}, {kBase + 300, kBase + 400}, {kBase + 900, kBase + 1000}}));
}

TEST(MappedRanges, ClipsToWhatWasAskedFor) {
  EXPECT_EQ(one_mapping().wanted_in(kBase + 50, 300),
            (std::vector<ByteRange>{{kBase + 50, kBase + 100}, {kBase + 300, kBase + 350}}));
  EXPECT_TRUE(one_mapping().wanted_in(kBase + 100, 200).empty());
}

TEST(MappedRanges, HonoursTheOffsetOfAMapping) {
  MappedRanges mapped;
  mapped.add(kBase, 500, 350, ranges({{0, 100}, {300, 400}, {900, 1000}}));
  EXPECT_EQ(mapped.wanted_in(kBase, 500), (std::vector<ByteRange>{{kBase, kBase + 50}}));
}

TEST(MappedRanges, CoversWholeRangesOfOneMappingOnly) {
  const MappedRanges mapped = one_mapping();
  EXPECT_TRUE(mapped.covers(kBase, 1000));
  EXPECT_TRUE(mapped.covers(kBase + 999, 1));
  EXPECT_FALSE(mapped.covers(kBase, 1001));
  EXPECT_FALSE(mapped.covers(kBase - 1, 2));
  EXPECT_FALSE(mapped.covers(kBase + 1000, 1));
}

TEST(MappedRanges, ForgetsAnUnmappedMiddleAndKeepsTheOffsetsOfTheRest) {
  MappedRanges mapped = one_mapping();
  mapped.remove(kBase + 350, 100);
  EXPECT_TRUE(mapped.covers(kBase, 350));
  EXPECT_FALSE(mapped.covers(kBase + 350, 1));
  EXPECT_EQ(mapped.wanted_in(kBase + 450, 550), (std::vector<ByteRange>{{kBase + 900, kBase + 1000}}));
}

TEST(MappedRanges, IsEmptyWhenEverythingIsUnmapped) {
  MappedRanges mapped = one_mapping();
  mapped.add(kBase + 5000, 10, 0, ranges({}));
  mapped.remove(kBase - 10, 20000);
  EXPECT_TRUE(mapped.empty());
}

TEST(MappedRanges, AMappingOverAnotherReplacesIt) {
  MappedRanges mapped = one_mapping();
  mapped.add(kBase, 1000, 0, ranges({{500, 600}}));
  EXPECT_EQ(mapped.wanted_in(kBase, 1000), (std::vector<ByteRange>{{kBase + 500, kBase + 600}}));
}

}  // namespace
}  // namespace moecached::shim
