// The reader on good files.
#include "daemon/model/gguf.h"

#include <unistd.h>

#include <algorithm>

#include "daemon/model/header_reader.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

class GgufVersions : public testing::TestWithParam<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Both, GgufVersions, testing::Values(2u, 3u));

TEST_P(GgufVersions, TensorsLieWhereTheirBytesAre) {
  const GgufImage image = make_moe({.version = GetParam(), .biases = true}).build();
  auto file = read_image(image);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->version, GetParam());
  EXPECT_EQ(file->file_bytes, image.bytes.size());
  EXPECT_EQ(file->data_offset, image.data_offset);
  ASSERT_EQ(file->tensors.size(), image.tensor_offsets.size());
  for (const GgufTensor& tensor : file->tensors) {
    ASSERT_GT(tensor.bytes, 0u);
    for (const std::uint64_t i : {std::uint64_t{0}, tensor.bytes / 2, tensor.bytes - 1}) {
      EXPECT_EQ(image.bytes[tensor.offset + i], tensor_byte(tensor.name, i)) << tensor.name << " byte " << i;
    }
  }
}

TEST(Gguf, ValuesOfEveryIntegerTypeAreKept) {
  GgufBuilder builder;
  builder.key_raw("u8", 0, {std::byte{0xff}})
      .key_raw("i8", 1, {std::byte{0xff}})
      .key_u16("u16", 0xfffe)
      .key_raw("i16", 3, {std::byte{0xfe}, std::byte{0xff}})
      .key_u32("u32", 0xfffffffd)
      .key_i32("i32", -3)
      .key_u64("u64", std::uint64_t{1} << 40)
      .key_u64("u64 huge", ~std::uint64_t{0})
      .key_raw("i64", 11, std::vector<std::byte>(8, std::byte{0xff}))
      .key_i32s("i32s", {1, -2, 3})
      .key_u32s("none", {});
  auto file = read_image(builder.build());
  ASSERT_TRUE(file) << file.error().text;
  const std::pair<const char*, std::vector<std::int64_t>> want[] = {{"u8", {255}},
                                                                    {"i8", {-1}},
                                                                    {"u16", {0xfffe}},
                                                                    {"i16", {-2}},
                                                                    {"u32", {0xfffffffd}},
                                                                    {"i32", {-3}},
                                                                    {"u64", {std::int64_t{1} << 40}},
                                                                    {"u64 huge", {INT64_MAX}},
                                                                    {"i64", {-1}},
                                                                    {"i32s", {1, -2, 3}},
                                                                    {"none", {}}};
  for (const auto& [key, integers] : want) {
    const GgufValue* value = file->find(key);
    ASSERT_NE(value, nullptr) << key;
    EXPECT_TRUE(value->kept) << key;
    EXPECT_EQ(value->integers, integers) << key;
    EXPECT_EQ(value->count, integers.size()) << key;
  }
}

TEST(Gguf, LongValuesAreSkippedAndWhatFollowsIsRead) {
  GgufBuilder builder;
  builder.key_text("template", std::string(200000, 'x'))
      .key_texts("vocabulary", std::vector<std::string>(30000, "token"))
      .key_u32s("merges", std::vector<std::uint32_t>(kGgufKeptElementsMax + 1, 7))
      .key_f32("scale", 1.5f)
      .key_bool("flag", true)
      .key_text("last", "here");
  auto file = read_image(builder.build());
  ASSERT_TRUE(file) << file.error().text;
  for (const char* key : {"template", "vocabulary", "merges", "scale", "flag"}) {
    ASSERT_NE(file->find(key), nullptr) << key;
    EXPECT_FALSE(file->find(key)->kept) << key;
    EXPECT_TRUE(file->find(key)->text.empty() && file->find(key)->integers.empty()) << key;
  }
  EXPECT_EQ(file->find("vocabulary")->count, 30000u);
  EXPECT_EQ(file->find("last")->text, "here");
}

TEST(Gguf, ValuesBeyondTheBudgetAreSkippedNotKept) {
  GgufBuilder builder;
  const std::vector<std::uint32_t> longest(kGgufKeptElementsMax, 1);
  const std::uint64_t fitting = kGgufKeptBytesMax / (kGgufKeptElementsMax * sizeof(std::int64_t));
  for (std::uint64_t i = 0; i <= fitting; ++i) builder.key_u32s("array " + std::to_string(i), longest);
  builder.key_u32("late", 1);
  auto file = read_image(builder.build());
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_TRUE(file->find("array " + std::to_string(fitting - 1))->kept);
  EXPECT_FALSE(file->find("array " + std::to_string(fitting))->kept);
  expect_fault(integer_value(*file, "late", 0, 10), FaultCode::kLimit, {"'late'"});
}

TEST(Gguf, AlignmentMovesTheData) {
  for (const std::uint32_t alignment : {1u, 8u, 64u, 4096u}) {
    GgufBuilder builder = make_moe({});
    const GgufImage image = builder.key_u32("general.alignment", alignment).align_data(alignment).build();
    auto file = read_image(image);
    ASSERT_TRUE(file) << file.error().text;
    EXPECT_EQ(file->alignment, alignment);
    for (const GgufTensor& tensor : file->tensors) {
      EXPECT_EQ(tensor.offset, image.tensor_offsets.at(tensor.name)) << tensor.name;
    }
  }
}

TEST(Gguf, AFileOfKeysAloneNeedsNoPadding) {
  GgufImage image = GgufBuilder().key_u32("k", 1).build();
  image.bytes.resize(image.header_bytes);
  auto file = read_image(image);
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_TRUE(file->tensors.empty());
}

TEST(Gguf, TensorsWithoutElementsAndScalarsAreAccepted) {
  auto file = read_image(GgufBuilder().tensor("empty", 0, {0, 4}).tensor("scalar", 0, {}).build());
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->tensors[0].bytes, 0u);
  EXPECT_EQ(file->tensors[1].bytes, 4u);
}

TEST(Gguf, ReadingLeavesThePositionOfTheDescriptorAlone) {
  const GgufImage image = make_moe({}).build();
  const UniqueFd fd = memory_file(image.bytes);
  ASSERT_EQ(::lseek(fd.get(), 17, SEEK_SET), 17);
  ASSERT_TRUE(read_gguf(fd.get()));
  EXPECT_EQ(::lseek(fd.get(), 0, SEEK_CUR), 17);
}

TEST(HeaderReader, ReadsAcrossItsBufferExactly) {
  std::vector<std::byte> bytes(3 * HeaderReader::kBufferBytes + 5);
  fill_tensor_bytes("any", 0, bytes);
  const UniqueFd fd = memory_file(bytes);
  auto reader = HeaderReader::open(fd.get(), bytes.size());
  ASSERT_TRUE(reader);
  std::vector<std::byte> got(bytes.size());
  std::span<std::byte> left(got);
  for (std::size_t step = 1; !left.empty(); step = step * 3 + 1) {
    const std::size_t n = std::min(step, left.size());
    ASSERT_TRUE(reader->read(left.first(n)));
    left = left.subspan(n);
  }
  EXPECT_EQ(got, bytes);
  EXPECT_EQ(reader->remaining(), 0u);
  EXPECT_FALSE(reader->skip(1));
}

TEST(HeaderReader, AFileThatShrinksMeanwhileIsAFaultNotACrash) {
  const std::vector<std::byte> bytes(4 * HeaderReader::kBufferBytes);
  const UniqueFd fd = memory_file(bytes);
  auto reader = HeaderReader::open(fd.get(), bytes.size());
  ASSERT_TRUE(reader);
  ASSERT_EQ(::ftruncate(fd.get(), HeaderReader::kBufferBytes), 0);
  std::vector<std::byte> got(bytes.size());
  ASSERT_FALSE(reader->read(got));
  expect_fault(Status(reader->fault("the header")), FaultCode::kChanged, {"the header", "shorter", "65536"});
}

}  // namespace
}  // namespace moecached::test
