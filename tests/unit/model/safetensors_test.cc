#include "daemon/model/safetensors.h"

#include <unistd.h>

#include "tests/support/safetensors_builder.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

Result<SafetensorsFile> read_bytes(std::span<const std::byte> bytes) {
  const UniqueFd fd = memory_file(bytes);
  return read_safetensors(fd.get());
}

TEST(Safetensors, TensorsAreFoundWhereTheyLie) {
  auto file = read_bytes(SafetensorsBuilder()
                             .tensor("a", "F32", {2, 3})
                             .tensor("b.c", "BF16", {5})
                             .tensor("s", "U8", {})
                             .build());
  ASSERT_TRUE(file) << file.error().text;
  ASSERT_EQ(file->tensors.size(), 3u);
  const SafetensorsTensor& a = file->tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.type->id, kGgmlF32);
  EXPECT_EQ(a.n_dims, 2u);
  EXPECT_EQ(a.shape[0], 2u);
  EXPECT_EQ(a.shape[1], 3u);
  EXPECT_EQ(a.bytes, 24u);
  EXPECT_EQ(file->tensors[1].offset, a.offset + 24);
  EXPECT_STREQ(file->tensors[1].dtype, "BF16");
  EXPECT_EQ(file->tensors[2].type, nullptr);
  EXPECT_EQ(file->tensors[2].bytes, 1u) << "a scalar";
  EXPECT_EQ(file->tensors[2].offset + 1, file->file_bytes);
}

TEST(Safetensors, PaddingEmptyTensorsAndOrderAreAllowed) {
  auto file = read_bytes(safetensors_with(
      R"({"late":{"shape":[4],"data_offsets":[4,8],"dtype":"U8"},"none":{"dtype":"F32","shape":[0,9],"data_offsets":[4,4]},)"
      R"("early":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}    )",
      8));
  ASSERT_TRUE(file) << file.error().text;
  EXPECT_EQ(file->tensors.size(), 3u);
  EXPECT_TRUE(read_bytes(safetensors_with("{}", 0)));
}

TEST(Safetensors, IsRecognisedByItsFirstBytes) {
  const auto looks = [](const std::vector<std::byte>& bytes) {
    return safetensors_header_bytes(memory_file(bytes).get()).value() != 0;
  };
  EXPECT_TRUE(looks(safetensors_with("{}", 3)));
  EXPECT_FALSE(looks(safetensors_with("[]", 3)));
  EXPECT_FALSE(looks(bytes_of(R"({"weight_map": {}, "filler": "................"})")));
  EXPECT_FALSE(looks(bytes_of("        {}")));
  EXPECT_FALSE(looks(make_moe({}).build().bytes));
  EXPECT_FALSE(looks({}));
  std::vector<std::byte> cut = safetensors_with("{}       ", 0);
  cut.pop_back();
  EXPECT_FALSE(looks(cut)) << "a header that is longer than the file";
}

// `a` is what is wrong in a file of 8 bytes of data that one tensor should fill.
struct Hostile {
  const char* name;
  const char* header;
  std::string_view first, second = "", third = "";  // words of the sentence
};
class HostileHeader : public testing::TestWithParam<Hostile> {};

TEST_P(HostileHeader, IsRefusedWithASentence) {
  expect_fault(read_bytes(safetensors_with(GetParam().header, 8)), FaultCode::kInvalid,
               {GetParam().first, GetParam().second, GetParam().third});
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileHeader,
    testing::Values(
        Hostile{"no_json", "{{{{", "not JSON", "byte 2"},
        Hostile{"cut", R"({"a":{"dtype":"F32",)", "not JSON"}, Hostile{"two_values", "{}{}", "not JSON"},
        Hostile{"array", "[]", "the header", "an array"}, Hostile{"number", R"({"a":7})", "'a'", "7"},
        Hostile{"null", R"({"a":null})", "'a'", "null"}, Hostile{"list", R"({"a":[1]})", "'a'", "an array"},
        Hostile{"metadata_number", R"({"__metadata__":{"x":1}})", "__metadata__", "1"},
        Hostile{"metadata_deep", R"({"__metadata__":{"x":{}}})", "__metadata__", "an object"},
        Hostile{"metadata_text", R"({"__metadata__":"x"})", "__metadata__", "'x'"},
        Hostile{"no_name", R"({"":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", "empty name"},
        Hostile{"zero_byte", R"({"a\u0000b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", "'a?b'",
                "zero byte"},
        Hostile{"no_dtype", R"({"a":{"shape":[8],"data_offsets":[0,8]}})", "'a'", "needs a dtype"},
        Hostile{"no_shape", R"({"a":{"dtype":"U8","data_offsets":[0,8]}})", "'a'", "a shape"},
        Hostile{"no_offsets", R"({"a":{"dtype":"U8","shape":[8]}})", "'a'", "data_offsets"},
        Hostile{"one_offset", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0]}})", "'a'",
                "two data_offsets"},
        Hostile{"three_offsets", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8,8]}})", "'a'",
                "more than two"},
        Hostile{"dtype_unknown", R"({"a":{"dtype":"F33","shape":[8],"data_offsets":[0,8]}})", "'a'", "'F33'"},
        Hostile{"dtype_number", R"({"a":{"dtype":8,"shape":[8],"data_offsets":[0,8]}})", "'a'", "8"},
        Hostile{"dtype_twice", R"({"a":{"dtype":"U8","dtype":"F32","shape":[8],"data_offsets":[0,8]}})",
                "'a'", "'dtype'", "twice"},
        Hostile{"shape_twice", R"({"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}})",
                "'shape'", "twice"},
        Hostile{"offsets_twice",
                R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"data_offsets":[0,8]}})",
                "'data_offsets'", "twice"},
        Hostile{"unknown_key", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"codec":"x"}})", "'a'",
                "'codec'"},
        Hostile{"shape_text", R"({"a":{"dtype":"U8","shape":"8","data_offsets":[0,8]}})", "'a'", "'8'"},
        Hostile{"shape_negative", R"({"a":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}})", "'a'", "-8"},
        Hostile{"shape_fraction", R"({"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}})", "'a'", "8.0"},
        Hostile{"shape_deep", R"({"a":{"dtype":"U8","shape":[[8]],"data_offsets":[0,8]}})", "'a'",
                "an array"},
        Hostile{"shape_long", R"({"a":{"dtype":"U8","shape":[8,1,1,1,1,1,1,1,1],"data_offsets":[0,8]}})",
                "'a'", "more than 8 dimensions"},
        Hostile{"shape_wraps",
                R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,8],"data_offsets":[0,8]}})", "'a'",
                "more elements"},
        Hostile{"bytes_wrap", R"({"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8]}})",
                "'a'", "more elements"},
        Hostile{"number_too_large",
                R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,18446744073709551616]}})", "'a'"},
        Hostile{"half_a_byte", R"({"a":{"dtype":"F4","shape":[15],"data_offsets":[0,8]}})", "'a'",
                "last byte"},
        Hostile{"wrong_size", R"({"a":{"dtype":"F32","shape":[8],"data_offsets":[0,8]}})", "'a'", "8 bytes",
                "32"},
        Hostile{"backwards", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[8,0]}})", "'a'", "8 to 0"},
        Hostile{"past_the_end", R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", "'a'", "0 to 9",
                "8 bytes"},
        Hostile{
            "far_past_the_end",
            R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})",
            "'a'", "8 bytes of data"},
        Hostile{"gap", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", "'a'", "gap"},
        Hostile{
            "overlap",
            R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
            "'b'", "inside"},
        Hostile{
            "same_place",
            R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
            "inside"},
        Hostile{"data_of_nobody", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                "the last tensor"},
        Hostile{"no_tensors", "{}", "the last tensor"},
        Hostile{
            "name_twice",
            R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
            "'a'", "twice"}),
    [](const auto& hostile) { return hostile.param.name; });

TEST(Safetensors, LengthsAndCountsAreLimited) {
  const std::string name(256, 'n');
  expect_fault(
      read_bytes(safetensors_with("{\"" + name + R"(":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", 8)),
      FaultCode::kLimit, {"256", "255"});

  const UniqueFd fd = memory_file(safetensors_with("{}", 0));
  const std::uint64_t length = kSafetensorsHeaderBytesMax + 1;
  ASSERT_EQ(::pwrite(fd.get(), &length, sizeof length, 0), static_cast<ssize_t>(sizeof length));
  ASSERT_EQ(::ftruncate(fd.get(), 40 << 20), 0);
  EXPECT_EQ(safetensors_header_bytes(fd.get()).value(), length);
  expect_fault(read_safetensors(fd.get()), FaultCode::kLimit, {std::to_string(length), "longest header"});

  std::string many = "{";
  for (std::uint64_t i = 0; i <= kSafetensorsTensorsMax; ++i)
    many +=
        (i == 0 ? "\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_fault(read_bytes(safetensors_with(many + "}", 0)), FaultCode::kLimit,
               {std::to_string(kSafetensorsTensorsMax)});
}

TEST(Safetensors, WhatCannotBeReadIsSaid) {
  expect_fault(read_safetensors(-1), FaultCode::kSystem, {"fstat"});
  expect_fault(read_bytes(bytes_of("short")), FaultCode::kInvalid, {"length of the header"});
}

}  // namespace
}  // namespace moecached::test
