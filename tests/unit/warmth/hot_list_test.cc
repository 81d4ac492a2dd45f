#include "daemon/warmth/hot_list.h"

#include <gmock/gmock.h>

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<UseList> two_lists() {
  return {
      {.label = "server", .layers = {{.block = 1, .counts = {5, 0, 7}}, {.block = 2, .counts = {1, 2, 3}}}},
      {.label = "agent", .layers = {{.block = 1, .counts = {9, 9, 9}}}}};
}

void expect_refused(const std::string& text, const std::string& why, FaultCode code = FaultCode::kInvalid) {
  const auto lists = parse_hot_lists(text);
  ASSERT_FALSE(lists) << text;
  EXPECT_THAT(lists.error().text, HasSubstr(why));
  EXPECT_EQ(lists.error().code, code);
}

const std::string kHead = "# moecounts-csv v1 {}\nworkload,layer,c0,c1\n";

TEST(HotList, ReadsBackWhatWasPrinted) {
  const auto lists = parse_hot_lists(print_hot_lists(0xabcdef, "a \"model\"", two_lists()));
  ASSERT_TRUE(lists) << lists.error().text;
  EXPECT_TRUE(lists->sealed);
  EXPECT_EQ(lists->key, 0xabcdefu);
  ASSERT_EQ(lists->lists.size(), 2u);
  EXPECT_EQ(lists->lists[0].label, "server");
  EXPECT_THAT(lists->lists[0].layers[0].counts, ElementsAre(5, 0, 7));
  EXPECT_EQ(lists->lists[0].layers[1].block, 2u);
  EXPECT_THAT(lists->lists[1].layers[0].counts, ElementsAre(9, 9, 9));
}

TEST(HotList, NeverTakesATruncatedOrChangedFileForASealedOne) {
  const std::string text = print_hot_lists(1, "m", two_lists());
  for (std::size_t n = 0; n < text.size(); ++n) {
    const auto lists = parse_hot_lists(std::string_view(text).substr(0, n));
    // Without its last newline alone it is still whole.
    if (lists && n + 1 < text.size()) {
      EXPECT_FALSE(lists->sealed) << n;
    }
    std::string changed = text;
    changed[n] = static_cast<char>(changed[n] ^ 1);
    const auto other = parse_hot_lists(changed);
    if (other && n + 1 < text.size()) {
      EXPECT_FALSE(other->sealed) << n;
    }
  }
}

TEST(HotList, ReadsCountsOfOtherTools) {
  const auto lists = parse_hot_lists(kHead + "decode,0,3,4\nprefill,0,1,1\ndecode,7,2,0\n");
  ASSERT_TRUE(lists) << lists.error().text;
  EXPECT_FALSE(lists->sealed);
  const UseList sum = sum_of(lists->lists);
  ASSERT_EQ(sum.layers.size(), 2u);
  EXPECT_THAT(sum.layers[0].counts, ElementsAre(4, 5));
  EXPECT_EQ(sum.layers[1].block, 7u);
}

TEST(HotList, RefusalsNameLineAndColumnButNotTheContents) {
  expect_refused("root:x:0:0", "line 1: does not begin with");
  expect_refused("# moecounts-csv v1 {}\nsecret\n", "line 2: does not name the columns");
  expect_refused(kHead + "decode,0,1,secret\n", "line 3: column 4 is not a whole number");
  expect_refused(kHead + "decode,4096,1\n", "column 2 is not a whole number up to 4095");
  expect_refused(kHead + "decode,0,-1\n", "column 3");
  expect_refused(kHead + "decode,0,4503599627370497\n", "column 3");
  expect_refused(kHead + "decode,0,99999999999999999999999\n", "column 3");
  expect_refused(kHead + "decode,0,1\ndecode,0,1\n", "line 4: gives layer 0 of its workload a second time");
  expect_refused(kHead + "decode,0\n", "has no counts");
  expect_refused(kHead, "has no counts");
  expect_refused(kHead + std::string(65, 'a') + ",0,1\n", "workload is longer than 64");
  expect_refused("# moecounts-csv v1 {\"key\":\"12\"}\nworkload,layer,c0\n", "its key is not 16");
  const auto secret = parse_hot_lists(kHead + "decode,0,1,secret\n");
  EXPECT_THAT(secret.error().text, testing::Not(HasSubstr("secret")));
}

TEST(HotList, HasLimits) {
  std::string wide = kHead + "decode,0";
  for (int i = 0; i < 4097; ++i) wide += ",1";
  expect_refused(wide + "\n", "more than 4096 counts", FaultCode::kLimit);
  std::string many = kHead;
  for (int i = 0; i < 17; ++i) many += "w" + std::to_string(i) + ",0,1\n";
  expect_refused(many, "line 19: begins workload number 17", FaultCode::kLimit);
}

TEST(HotList, FitsListsToAModel) {
  const BlockShape shapes[] = {{.block = 1, .n_experts = 4}, {.block = 3, .n_experts = 2}};
  const auto fitted = fit_to(two_lists()[0], shapes);
  ASSERT_TRUE(fitted) << fitted.error().text;
  EXPECT_THAT(fitted->layers[0].counts, ElementsAre(5, 0, 7, 0));
  EXPECT_THAT(fitted->layers[1].counts, ElementsAre(0, 0));
  const BlockShape narrow[] = {{.block = 1, .n_experts = 2}};
  EXPECT_THAT(fit_to(two_lists()[0], narrow).error().text, HasSubstr("3 counts, the model 2 experts"));
  const BlockShape others[] = {{.block = 9, .n_experts = 8}};
  EXPECT_THAT(fit_to(two_lists()[0], others).error().text, HasSubstr("another model's"));
}

TEST(HotList, LabelsCannotBreakTheFile) {
  EXPECT_EQ(file_label("a b,c\n\"#"), "a_b_c___");
  EXPECT_EQ(file_label(std::string(100, 'x')).size(), kUseLabelBytesMax);
}

}  // namespace
}  // namespace moecached
