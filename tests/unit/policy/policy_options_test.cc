#include "daemon/policy/policy_options.h"

#include <gtest/gtest.h>

#include <array>

namespace moecached {
namespace {

constexpr std::array<std::string_view, 2> kColours = {"red", "blue"};

TEST(PolicyOptions, GivesTheFallbacksWhenNothingIsGiven) {
  auto options = PolicyOptions::parse("p", "");
  ASSERT_TRUE(options);
  EXPECT_EQ(*options->number("size", {.low = 1, .high = 9}, 4), 4u);
  EXPECT_EQ(*options->word("colour", kColours), 0u);
  EXPECT_TRUE(options->all_known());
}

TEST(PolicyOptions, ReadsNumbersAndWordsInAnyOrder) {
  auto options = PolicyOptions::parse("p", "colour=blue,size=9");
  ASSERT_TRUE(options);
  EXPECT_EQ(*options->number("size", {.low = 1, .high = 9}, 4), 9u);
  EXPECT_EQ(*options->word("colour", kColours), 1u);
  EXPECT_TRUE(options->all_known());
}

TEST(PolicyOptions, SaysWhatIsWrongWithAValue) {
  for (std::string_view text :
       {"size=0", "size=10", "size=-1", "size=", "size=3x", "size= 3", "size=4294967299"}) {
    auto options = PolicyOptions::parse("p", text);
    ASSERT_TRUE(options) << text;
    const auto number = options->number("size", {.low = 1, .high = 9}, 4);
    ASSERT_FALSE(number) << text;
    EXPECT_EQ(number.error().code, FaultCode::kInvalid);
    EXPECT_EQ(number.error().text, "policy p: " + std::string(text) + " is not a whole number from 1 to 9");
  }
  auto options = PolicyOptions::parse("p", "colour=green");
  ASSERT_TRUE(options);
  const auto word = options->word("colour", kColours);
  ASSERT_FALSE(word);
  EXPECT_EQ(word.error().text, "policy p: colour=green is not one of red, blue");
}

TEST(PolicyOptions, ListsTheKnownOnesWhenOneIsUnknown) {
  auto options = PolicyOptions::parse("p", "siez=3");
  ASSERT_TRUE(options);
  ASSERT_TRUE(options->number("size", {.low = 1, .high = 9}, 4));
  ASSERT_TRUE(options->word("colour", kColours));
  const Status known = options->all_known();
  ASSERT_FALSE(known);
  EXPECT_EQ(known.error().text, "policy p: no option 'siez'; it has size, colour, admit");
}

TEST(PolicyOptions, RefusesItemsThatAreNotKeyEqualsValueAndKeysGivenTwice) {
  for (std::string_view text : {"size", "=3", ",", "size=3,,colour=red"}) {
    EXPECT_FALSE(PolicyOptions::parse("p", text)) << text;
  }
  const auto twice = PolicyOptions::parse("p", "size=3,size=3");
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().text, "policy p: option 'size' is given twice");
}

}  // namespace
}  // namespace moecached
