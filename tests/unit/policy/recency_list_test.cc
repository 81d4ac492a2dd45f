#include "daemon/policy/recency_list.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

namespace moecached {
namespace {

std::vector<std::uint32_t> all_of(const RecencyList& list, std::uint32_t n_experts) {
  const std::vector<std::uint8_t> marks(n_experts, 1);
  std::vector<ExpertIndex> out(n_experts);
  out.resize(list.append_marked(marks, out, 0));
  std::vector<std::uint32_t> values;
  for (ExpertIndex expert : out) values.push_back(expert.value);
  return values;
}

TEST(RecencyList, OrdersByKeyThenByIndexWhateverTheEndItIsFilledFrom) {
  RecencyList list(8);
  list.insert_from_back(ExpertIndex(5), 7);
  list.insert_from_front(ExpertIndex(2), 7);
  list.insert_from_back(ExpertIndex(7), 3);
  list.insert_from_front(ExpertIndex(0), 9);
  list.insert_from_back(ExpertIndex(3), 7);
  EXPECT_EQ(all_of(list, 8), (std::vector<std::uint32_t>{7, 2, 3, 5, 0}));
}

TEST(RecencyList, StopsWhenTheOutputIsFullAndKeepsWhatWasWritten) {
  RecencyList list(4);
  for (std::uint32_t i = 0; i < 4; ++i) list.insert_from_back(ExpertIndex(i), 4 - i);
  const std::vector<std::uint8_t> marks = {1, 1, 0, 1};
  std::vector<ExpertIndex> out(2, ExpertIndex(99));
  EXPECT_EQ(list.append_marked(marks, out, 1), 2u);
  EXPECT_EQ(out[0].value, 99u);
  EXPECT_EQ(out[1].value, 3u);
}

TEST(RecencyList, AgreesWithASortedSetOverARandomRun) {
  constexpr std::uint32_t kExperts = 24;
  std::mt19937 random(7);
  RecencyList list(kExperts);
  std::set<std::pair<std::int64_t, std::uint32_t>> model;
  std::map<std::uint32_t, std::int64_t> key_of;
  for (int round = 0; round < 20000; ++round) {
    const std::uint32_t expert = static_cast<std::uint32_t>(random() % kExperts);
    ASSERT_EQ(list.contains(ExpertIndex(expert)), key_of.contains(expert));
    if (key_of.contains(expert)) {
      list.erase(ExpertIndex(expert));
      model.erase({key_of[expert], expert});
      key_of.erase(expert);
    } else {
      const std::int64_t key = static_cast<std::int64_t>(random() % 9) - 4;
      if (random() % 2 == 0) {
        list.insert_from_back(ExpertIndex(expert), key);
      } else {
        list.insert_from_front(ExpertIndex(expert), key);
      }
      model.emplace(key, expert);
      key_of[expert] = key;
    }
    std::vector<std::uint32_t> expected;
    for (const auto& [key, value] : model) expected.push_back(value);
    ASSERT_EQ(all_of(list, kExperts), expected);
    ASSERT_EQ(list.size(), expected.size());
    if (!expected.empty()) {
      ASSERT_EQ(list.front().value, expected.front());
    }
  }
}

TEST(RecencyListDeathTest, AbortsOnASecondInsertAndOnAnEraseOfWhatIsNotThere) {
  RecencyList list(2);
  list.insert_from_back(ExpertIndex(1), 1);
  EXPECT_DEATH(list.insert_from_back(ExpertIndex(1), 2), "CHECK failed");
  EXPECT_DEATH(list.erase(ExpertIndex(0)), "CHECK failed");
  EXPECT_DEATH((void)list.contains(ExpertIndex(2)), "CHECK failed");
}

}  // namespace
}  // namespace moecached
