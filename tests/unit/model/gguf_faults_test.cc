// The reader on files that contradict themselves: one test for each kind of lie, each text naming who lied
// and how.
#include <fcntl.h>
#include <unistd.h>

#include <limits>

#include "daemon/model/gguf.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr const char* kUp = "blk.1.ffn_up_exps.weight";

std::string tensor_field(const char* field) { return "tensor " + std::string(kUp) + " " + field; }

class GgufFaults : public testing::Test {
 protected:
  void expect(FaultCode code, std::initializer_list<std::string_view> words) {
    expect_fault(read_image(image_), code, words);
  }

  GgufImage image_ = make_moe({}).build();
};

TEST_F(GgufFaults, UndamagedImageIsRead) { EXPECT_TRUE(read_image(image_)); }

TEST_F(GgufFaults, Magic) {
  image_.put_u8("magic", 'g');
  expect(FaultCode::kInvalid, {"gGUF", "GGUF"});
}

TEST_F(GgufFaults, EmptyFile) {
  image_.bytes.clear();
  expect(FaultCode::kInvalid, {"0 bytes are left of the file (0 bytes)"});
}

TEST_F(GgufFaults, Versions) {
  for (const std::uint32_t version : {0u, 1u, 4u, 0xffffffffu}) {
    image_.put_u32("version", version);
    expect(FaultCode::kUnsupported, {"version " + std::to_string(version), "2 and 3"});
  }
}

TEST_F(GgufFaults, BigEndian) {
  image_.put_u32("version", 0x03000000);
  expect(FaultCode::kUnsupported, {"big-endian", "version 3", "little-endian"});
}

TEST_F(GgufFaults, TensorCountBeyondTheFile) {
  for (const std::uint64_t count :
       {kMax, kMax / 29 + 1, std::uint64_t{1} << 63, std::uint64_t{image_.bytes.size()}}) {
    image_.put_u64("tensor count", count);
    expect(FaultCode::kInvalid, {"tensor count " + std::to_string(count)});
  }
}

TEST_F(GgufFaults, TensorCountOneTooMany) {
  const UniqueFd fd = memory_file(image_.bytes);
  auto good = read_gguf(fd.get());
  ASSERT_TRUE(good);
  image_.put_u64("tensor count", good->tensors.size() + 1);
  EXPECT_FALSE(read_image(image_));
}

TEST_F(GgufFaults, KeyCountBeyondTheFile) {
  for (const std::uint64_t count : {kMax, std::uint64_t{1} << 63, std::uint64_t{image_.bytes.size()}}) {
    image_.put_u64("key count", count);
    expect(FaultCode::kInvalid, {"key count " + std::to_string(count)});
  }
}

TEST_F(GgufFaults, CountsAboveTheLimits) {
  image_.bytes.resize(32u << 20);  // room enough for both, were it not for the limit
  GgufImage keys = image_;
  keys.put_u64("key count", kGgufKeysMax + 1);
  expect_fault(read_image(keys), FaultCode::kLimit, {"key count 16385", "16384"});
  image_.put_u64("tensor count", kGgufTensorsMax + 1);
  expect(FaultCode::kLimit, {"tensor count 262145", "262144"});
}

TEST_F(GgufFaults, KeyNameLength) {
  image_.put_u64("key general.name length", kMax);
  expect(FaultCode::kInvalid, {"name of key 1", std::to_string(kMax)});
  image_.put_u64("key general.name length", 0);
  expect(FaultCode::kInvalid, {"name of key 1 is empty"});
  image_.put_u64("key general.name length", kGgufKeyBytesMax + 1);
  expect(FaultCode::kLimit, {"name of key 1", "1025", "1024"});
}

TEST_F(GgufFaults, StringValueLength) {
  for (const std::uint64_t length : {kMax, kMax - 8, std::uint64_t{image_.bytes.size()}}) {
    image_.put_u64("key general.name value", length);
    expect(FaultCode::kInvalid, {"'general.name'", std::to_string(length)});
  }
}

TEST_F(GgufFaults, StringInAnArrayLength) {
  image_.put_u64("key tokenizer.ggml.tokens value", kMax - 3);
  expect(FaultCode::kInvalid, {"string 0", "'tokenizer.ggml.tokens'", std::to_string(kMax - 3)});
}

TEST_F(GgufFaults, ValueType) {
  for (const std::uint32_t type : {13u, 0x80000000u, 0xffffffffu}) {
    image_.put_u32("key general.name type", type);
    expect(FaultCode::kInvalid, {"'general.name'", "type " + std::to_string(type), "12"});
  }
}

TEST_F(GgufFaults, ArrayElementType) {
  image_.put_u32("key tokenizer.ggml.token_type element type", 13);
  expect(FaultCode::kInvalid, {"'tokenizer.ggml.token_type'", "type 13"});
}

TEST_F(GgufFaults, ArrayOfArrays) {
  image_.put_u32("key tokenizer.ggml.token_type element type", 9);
  expect(FaultCode::kInvalid, {"'tokenizer.ggml.token_type'", "array of arrays"});
}

TEST_F(GgufFaults, ArrayCountWhoseSizeWraps) {
  for (const std::uint64_t count : {kMax, std::uint64_t{1} << 62, (std::uint64_t{1} << 62) + 4}) {
    image_.put_u64("key tokenizer.ggml.token_type count",
                   count);  // of 4 bytes: 2^62 of them are 0 modulo 2^64
    expect(FaultCode::kInvalid, {"'tokenizer.ggml.token_type'", std::to_string(count)});
  }
  image_ = make_moe({}).build();
  for (const std::uint64_t count : {kMax, (std::uint64_t{1} << 61) + 1}) {
    image_.put_u64("key tokenizer.ggml.tokens count", count);
    expect(FaultCode::kInvalid, {"'tokenizer.ggml.tokens'", std::to_string(count)});
  }
}

TEST_F(GgufFaults, ArrayReadAsAnotherType) {
  // Strings read as numbers leave the reader in the middle of a string: whatever follows must not pass for a
  // key.
  image_.put_u32("key tokenizer.ggml.tokens element type", 10);
  EXPECT_FALSE(read_image(image_));
  image_.put_u32("key tokenizer.ggml.tokens type", 8);
  EXPECT_FALSE(read_image(image_));
}

TEST_F(GgufFaults, DuplicateKey) {
  image_ = make_moe({}).key_u32("qwen3moe.expert_count", 4).build();
  expect(FaultCode::kInvalid, {"'qwen3moe.expert_count'", "twice"});
}

TEST_F(GgufFaults, AlignmentThatIsNoPowerOfTwo) {
  for (const std::uint32_t alignment : {0u, 3u, 48u, 0xffffffffu}) {
    image_ = make_moe({}).key_u32("general.alignment", alignment).build();
    expect(FaultCode::kInvalid, {"'general.alignment'", std::to_string(alignment)});
  }
}

TEST_F(GgufFaults, AlignmentBeyondTheFile) {
  image_ = make_moe({}).key_u32("general.alignment", 1u << 31).build();
  expect(FaultCode::kInvalid, {"alignment 2147483648", std::to_string(image_.bytes.size())});
}

TEST_F(GgufFaults, AlignmentOfTheWrongType) {
  image_ = make_moe({}).key_text("general.alignment", "32").build();
  expect(FaultCode::kInvalid, {"'general.alignment'", "string"});
  image_ = make_moe({}).key_u32s("general.alignment", {32}).build();
  expect(FaultCode::kInvalid, {"'general.alignment'", "array"});
  image_ = make_moe({}).key_i32("general.alignment", -32).build();
  expect(FaultCode::kInvalid, {"'general.alignment'", "-32"});
  image_ = make_moe({}).key_u64("general.alignment", std::uint64_t{1} << 63).build();
  expect(FaultCode::kInvalid, {"'general.alignment'"});
}

TEST_F(GgufFaults, TensorNameLength) {
  image_.put_u64(tensor_field("length"), kMax);
  expect(FaultCode::kInvalid, {"name of tensor", std::to_string(kMax)});
  image_.put_u64(tensor_field("length"), 0);
  expect(FaultCode::kInvalid, {"name of tensor", "empty"});
  image_.put_u64(tensor_field("length"), 64);
  expect(FaultCode::kLimit, {"name of tensor", "64 bytes", "63"});
}

TEST_F(GgufFaults, TensorNameWithAZeroByte) {
  using namespace std::string_literals;
  image_ = GgufBuilder().tensor("blk.0.ffn_up_exps.weight\0x"s, 0, {4}).build();
  expect(FaultCode::kInvalid, {"zero byte", "blk.0.ffn_up_exps.weight?x"});
}

TEST_F(GgufFaults, DuplicateTensor) {
  image_ = make_moe({}).tensor(kUp, 0, {4}).build();
  expect(FaultCode::kInvalid, {kUp, "twice"});
}

TEST_F(GgufFaults, DimensionCount) {
  for (const std::uint32_t dims : {5u, 0x80000003u, 0xffffffffu}) {
    image_.put_u32(tensor_field("dims"), dims);
    expect(FaultCode::kInvalid, {kUp, std::to_string(dims), "4"});
  }
}

TEST_F(GgufFaults, NegativeDimension) {
  image_.put_u64(tensor_field("ne1"), std::uint64_t{1} << 63);
  expect(FaultCode::kInvalid, {kUp, "9223372036854775808", "dimension 1"});
}

TEST_F(GgufFaults, ElementProductWraps) {
  image_.put_u64(tensor_field("ne0"), std::uint64_t{1} << 32);
  image_.put_u64(tensor_field("ne1"), std::uint64_t{1} << 32);  // 2^64 is 0, times 4 experts
  expect(FaultCode::kInvalid, {kUp, "4294967296 x 4294967296 x 4", "more than a file can hold"});
  image_.put_u64(tensor_field("ne1"), std::uint64_t{1} << 29);  // 2^63 elements: no wrap, but no int64 either
  expect(FaultCode::kInvalid, {kUp, "more than a file can hold"});
}

TEST_F(GgufFaults, ByteSizeWraps) {
  image_.put_u32(tensor_field("type"), 28);  // f64
  image_.put_u64(tensor_field("ne0"), std::uint64_t{1} << 30);
  image_.put_u64(tensor_field("ne1"), std::uint64_t{1} << 29);  // 2^61 elements with 4 experts: 2^64 bytes
  expect(FaultCode::kInvalid, {kUp, "more than a file can hold"});
}

TEST_F(GgufFaults, RowsThatAreNotWholeBlocks) {
  for (const std::uint64_t ne0 : {std::uint64_t{63}, std::uint64_t{1}, std::uint64_t{33}}) {
    image_.put_u64(tensor_field("ne0"), ne0);
    expect(FaultCode::kInvalid, {kUp, "rows of " + std::to_string(ne0), "32", "q8_0"});
  }
}

TEST_F(GgufFaults, TensorType) {
  for (const std::uint32_t type : {4u, 31u, 43u, 0x80000008u, 0xffffffffu}) {
    image_.put_u32(tensor_field("type"), type);
    expect(FaultCode::kInvalid, {kUp, "type " + std::to_string(type), "42"});
  }
}

TEST_F(GgufFaults, OffsetPastTheEnd) {
  const auto past = static_cast<std::uint64_t>(image_.bytes.size()) / 32 * 32;
  for (const std::uint64_t offset : {past, std::uint64_t{1} << 62}) {
    image_.put_u64(tensor_field("offset"), offset);
    expect(FaultCode::kInvalid,
           {kUp, "offset " + std::to_string(offset), std::to_string(image_.bytes.size())});
  }
}

TEST_F(GgufFaults, OffsetThatWrapsIntoTheFile) {
  // offset + data_offset is small again modulo 2^64, and so is the end.
  for (const std::uint64_t back : {std::uint64_t{32}, std::uint64_t{image_.data_offset}}) {
    image_.put_u64(tensor_field("offset"), 0 - back);
    expect(FaultCode::kInvalid, {kUp, "offset " + std::to_string(0 - back)});
  }
}

TEST_F(GgufFaults, EndThatWrapsIntoTheFile) {
  image_.put_u32(tensor_field("type"), 28);  // f64
  image_.put_u64(tensor_field("ne0"), std::uint64_t{1} << 30);
  image_.put_u64(tensor_field("ne1"), std::uint64_t{1} << 28);  // 2^60 elements with 4 experts: 2^63 bytes
  image_.put_u64(tensor_field("offset"), std::uint64_t{1} << 63);
  expect(FaultCode::kInvalid, {kUp, "offset 9223372036854775808 and 9223372036854775808 bytes"});
}

TEST_F(GgufFaults, SizePastTheEndByOneBlock) {
  const std::string last = "tensor blk.1.ffn_up_exps.weight ne1";  // the last tensor of the file
  image_.put_u64(last, 33);
  expect(FaultCode::kInvalid, {kUp, std::to_string(image_.bytes.size())});
}

TEST_F(GgufFaults, OffsetThatIsNotAligned) {
  image_.put_u64(tensor_field("offset"), 33);
  expect(FaultCode::kInvalid, {kUp, "offset 33", "32"});
}

TEST_F(GgufFaults, OverlappingTensors) {
  image_.put_u64(tensor_field("offset"), 0);
  expect(FaultCode::kInvalid, {kUp, "inside tensor", "'token_embd.weight'"});
  image_ = make_moe({}).build();
  image_.put_u64("tensor blk.0.ffn_norm.weight offset", 32);
  expect(FaultCode::kInvalid, {"'blk.0.ffn_norm.weight'", "inside tensor 'token_embd.weight'"});
}

TEST_F(GgufFaults, HeaderBeyondTheLimit) {
  // A sparse terabyte: everything below fits the file, and must still not be read to its end.
  const UniqueFd fd = memory_file(image_.bytes);
  ASSERT_EQ(::ftruncate(fd.get(), off_t{1} << 40), 0);
  const auto put = [&](const char* field, std::uint64_t value) {
    return ::pwrite(fd.get(), &value, sizeof value, static_cast<off_t>(image_.at(field))) == sizeof value;
  };
  ASSERT_TRUE(put("key tokenizer.ggml.tokens count", kGgufHeaderBytesMax / 8));
  expect_fault(read_gguf(fd.get()), FaultCode::kLimit,
               {"tokenizer.ggml.tokens", "33554432 strings", "268435456"});
  ASSERT_TRUE(put("key tokenizer.ggml.tokens count", 4));
  ASSERT_TRUE(put("key general.name value", kGgufHeaderBytesMax));
  expect_fault(read_gguf(fd.get()), FaultCode::kLimit,
               {"'general.name'", "268435456 bytes,", "longest header"});
  ASSERT_TRUE(put("key general.name value", kGgufHeaderBytesMax - 12 - image_.at("key general.name value")));
  expect_fault(read_gguf(fd.get()), FaultCode::kLimit,
               {"key 2", "8 bytes are needed", "only 4", "longest header"});
}

TEST_F(GgufFaults, WhatIsNotARegularFile) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd reading(ends[0]);
  const UniqueFd writing(ends[1]);
  expect_fault(read_gguf(reading.get()), FaultCode::kInvalid, {"not a regular file"});
  const UniqueFd folder(::open("/", O_RDONLY | O_DIRECTORY));
  expect_fault(read_gguf(folder.get()), FaultCode::kInvalid, {"not a regular file"});
  expect_fault(read_gguf(-1), FaultCode::kSystem, {"fstat"});
}

TEST_F(GgufFaults, FilesThatCannotBeRead) {
  const std::string path = testing::TempDir() + "/moecached_write_only_" + std::to_string(::getpid());
  write_file(path, image_.bytes);
  const UniqueFd fd(::open(path.c_str(), O_WRONLY));
  ::unlink(path.c_str());
  ASSERT_TRUE(fd);
  expect_fault(read_gguf(fd.get()), FaultCode::kSystem, {"pread"});
}

}  // namespace
}  // namespace moecached::test
