#include "daemon/config/size.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

constexpr std::uint64_t kWhole = 10u << 20;

std::uint64_t parsed(std::string_view text) {
  const Result<std::uint64_t> bytes = parse_size(text, kWhole);
  EXPECT_TRUE(bytes) << text << " " << (bytes ? "" : bytes.error().text);
  return bytes ? *bytes : 0;
}

TEST(ParseSize, UnitsWithAnIAreOf1024AndWithoutOf1000) {
  EXPECT_EQ(parsed("4GiB"), std::uint64_t{4} << 30);
  EXPECT_EQ(parsed("512MiB"), 512u << 20);
  EXPECT_EQ(parsed("2T"), std::uint64_t{2} << 40);
  EXPECT_EQ(parsed("1.5GB"), 1'500'000'000u);
  EXPECT_EQ(parsed("1.5 gib"), 1'610'612'736u);
  EXPECT_EQ(parsed("7"), 7u);
  EXPECT_EQ(parsed("7b"), 7u);
  EXPECT_EQ(parsed("3kB"), 3000u);
}

TEST(ParseSize, ByteCountsAreExactUpTo64Bits) {
  EXPECT_EQ(parsed("18446744073709551615"), UINT64_MAX);
  EXPECT_EQ(parsed("9007199254740993"), 9007199254740993u) << "a double would round this";
}

TEST(ParseSize, AShareIsOfTheWholeInWholePages) {
  EXPECT_EQ(parsed("100%"), kWhole);
  EXPECT_EQ(parsed("50%"), kWhole / 2);
  EXPECT_EQ(parsed("33.3%") % 4096, 0u);
  EXPECT_EQ(parsed("0%"), 0u);
}

TEST(ParseSize, WhatIsNoSizeIsRefused) {
  for (const char* text : {"",
                           "GiB",
                           "4XiB",
                           "-1",
                           "4 GiB x",
                           "1e9",
                           "0x10",
                           "%",
                           "4%%",
                           ".5GiB",
                           "1..5GiB",
                           "inf",
                           "nan",
                           "100.1%",
                           "101%",
                           "18446744073709551616",
                           "17179869184GiB",
                           "1e400",
                           "99999999999.5TiB",
                           "4GiB\n"}) {
    EXPECT_FALSE(parse_size(text, kWhole)) << text;
  }
}

TEST(FormatSize, PrintsTheLargestUnitThatDividesAndParsesBack) {
  EXPECT_EQ(format_size(std::uint64_t{4} << 30), "4GiB");
  EXPECT_EQ(format_size(1536u << 20), "1536MiB");
  EXPECT_EQ(format_size(1000), "1000");
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{65536}, std::uint64_t{UINT64_MAX}}) {
    EXPECT_EQ(parsed(format_size(bytes)), bytes);
  }
}

}  // namespace
}  // namespace moecached
