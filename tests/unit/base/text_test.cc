#include "daemon/base/text.h"

#include <gtest/gtest.h>

namespace moecached {
namespace {

TEST(Text, QuotedIsOneShortPrintableLine) {
  EXPECT_EQ(in_quotes("blk.0"), "'blk.0'");
  EXPECT_EQ(in_quotes(std::string_view("a\0b\n\x1b[31m\xff", 10)), "'a?b??[31m?'");
  EXPECT_EQ(in_quotes(std::string(90, 'x')), "'" + std::string(90, 'x') + "'");
  EXPECT_EQ(in_quotes(std::string(5000, 'x')), "'" + std::string(90, 'x') + "...'");
}

TEST(Text, NamesForPeopleKeepUtf8AndLoseControlCharacters) {
  EXPECT_EQ(for_people("Mod\xc3\xa8le \xe6\xa8\xa1 \xf0\x9f\x98\x80\n"),
            "Mod\xc3\xa8le \xe6\xa8\xa1 \xf0\x9f\x98\x80?");
}

TEST(Text, NamesThatAreNotUtf8BecomeAscii) {
  EXPECT_EQ(for_people("a\xff"), "a?");
  EXPECT_EQ(for_people("\xc3"), "?");                 // cut short
  EXPECT_EQ(for_people("\xc3("), "?(");               // no continuation
  EXPECT_EQ(for_people("\xc0\xaf"), "??");            // overlong
  EXPECT_EQ(for_people("\xe0\x80\xaf"), "???");       // overlong
  EXPECT_EQ(for_people("\xed\xa0\x80"), "???");       // surrogate
  EXPECT_EQ(for_people("\xf0\x8f\xbf\xbf"), "????");  // overlong
  EXPECT_EQ(for_people("\xf4\x90\x80\x80"), "????");  // above U+10FFFF
}

}  // namespace
}  // namespace moecached
