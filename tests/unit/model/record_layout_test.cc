#include "daemon/model/record_layout.h"

#include <vector>

#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

std::vector<PartLayout> parts_of(
    std::initializer_list<std::pair<std::uint64_t, std::uint64_t>> offset_and_bytes) {
  std::vector<PartLayout> parts;
  for (const auto& [offset, bytes] : offset_and_bytes) {
    PartLayout part;
    part.kind = static_cast<moecached_part_kind>(parts.size());
    part.file_offset = offset;
    part.expert_bytes = bytes;
    part.name = std::string(1, static_cast<char>('a' + parts.size()));
    parts.push_back(part);
  }
  return parts;
}

TEST(RecordLayout, WithoutDirectReadsPartsArePackedAtCacheLines) {
  auto parts = parts_of({{96, 4096}, {8192, 100}, {160, 64}});
  EXPECT_EQ(lay_out_record(parts, 0).value(), 4096u + 128 + 64);
  EXPECT_EQ(parts[0].slot_offset, 0u);
  EXPECT_EQ(parts[1].slot_offset, 4096u);
  EXPECT_EQ(parts[2].slot_offset, 4096u + 128);
  for (const PartLayout& part : parts) EXPECT_FALSE(part.direct);
}

TEST(RecordLayout, ADirectPartHasThePhaseOfItsFileAndItsBlocksAlone) {
  auto parts = parts_of({{4096 * 5 + 96, 8192}, {4096 * 9 + 4064, 4096}, {4096 * 20, 4096}});
  EXPECT_EQ(lay_out_record(parts, 4096).value(), 4096u * 6);
  EXPECT_EQ(parts[0].slot_offset, 96u);               // blocks 0, 1 and 2
  EXPECT_EQ(parts[1].slot_offset, 4096u * 3 + 4064);  // blocks 3 and 4
  EXPECT_EQ(parts[2].slot_offset, 4096u * 5);         // block 5: no phase, no padding
  for (const PartLayout& part : parts) EXPECT_TRUE(part.direct);
}

TEST(RecordLayout, CopiedPartsLieBehindTheBlocksOfDirectOnes) {
  auto parts = parts_of({{0, 1000}, {32, 4096}, {64, 1000}});
  EXPECT_EQ(lay_out_record(parts, 4096).value(), 4096u * 3);
  EXPECT_FALSE(parts[0].direct);
  EXPECT_TRUE(parts[1].direct);
  EXPECT_EQ(parts[1].slot_offset, 32u);
  EXPECT_EQ(parts[0].slot_offset, 8192u);
  EXPECT_EQ(parts[2].slot_offset, 8192u + 1024);
}

TEST(RecordLayout, SmallAlignmentsKeepTheStrideOnCacheLines) {
  auto parts = parts_of({{48, 96}, {16, 160}});
  EXPECT_EQ(lay_out_record(parts, 32).value() % 64, 0u);
  EXPECT_EQ(parts[0].slot_offset % 32, 16u);
  EXPECT_EQ(parts[1].slot_offset % 32, 16u);
}

TEST(RecordLayout, SumsThatWrapAreRefused) {
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  auto packed = parts_of({{0, kHalf}, {0, kHalf}});
  expect_fault(lay_out_record(packed, 0), FaultCode::kInvalid, {"'b'", "2^64"});
  auto direct = parts_of({{0, kHalf}, {0, kHalf}});
  expect_fault(lay_out_record(direct, 4096), FaultCode::kInvalid, {"'b'", "2^64"});
  auto rounded = parts_of({{0, ~std::uint64_t{0} - 8}});
  expect_fault(lay_out_record(rounded, 0), FaultCode::kInvalid, {"'a'"});
  auto phase = parts_of({{4095, ~std::uint64_t{0} - 4095}});
  expect_fault(lay_out_record(phase, 4096), FaultCode::kInvalid, {"'a'"});
}

}  // namespace
}  // namespace moecached::test
