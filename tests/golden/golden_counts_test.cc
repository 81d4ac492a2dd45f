// Hits per step of a short trace, worked out by hand, against those that the brain counts. The reasoning is
// in the file of expectations.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "daemon/residency/brain.h"

namespace moecached {
namespace {

constexpr std::uint32_t kExperts = 5, kSlots = 3;
using Steps = std::vector<std::vector<ExpertIndex>>;
using Hits = std::vector<std::uint64_t>;

std::ifstream open_golden(const std::string& name) {
  std::ifstream file(std::string(MOECACHED_GOLDEN_DIR) + "/" + name);
  EXPECT_TRUE(file) << name;
  return file;
}

Steps read_trace(const std::string& name) {
  std::ifstream file = open_golden(name);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line.rfind("# moetrace-csv v1 ", 0), 0u);
  std::getline(file, line);
  EXPECT_EQ(line, "seq,tok,phase,L0_0,L0_1");
  Steps steps;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string field;
    std::vector<ExpertIndex> set;
    for (int column = 0; std::getline(fields, field, ','); ++column) {
      if (column >= 3) set.emplace_back(static_cast<std::uint32_t>(std::stoul(field)));
    }
    steps.push_back(set);
  }
  return steps;
}

std::map<std::string, Hits> read_expected(const std::string& name) {
  std::ifstream file = open_golden(name);
  std::map<std::string, Hits> expected;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string policy;
    words >> policy;
    for (std::uint64_t hits = 0; words >> hits;) expected[policy].push_back(hits);
  }
  return expected;
}

// Each step leases its experts, which are read at once, and ends before the next one.
Hits replay(const std::string& policy, const Steps& steps) {
  Brain brain;
  EXPECT_TRUE(brain.add_model(ModelId(0), {.layers = {{kExperts, kSlots}}, .policy = policy}));
  brain.lane_opened(LaneId(0), ModelId(0));
  Hits hits;
  std::uint64_t before = 0;
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    brain.lease(LaneId(0), LayerIndex(0), steps[i], i + 1, i + 1);
    for (;;) {
      const auto taken = brain.take_commands();
      const std::vector<Command> commands(taken.begin(), taken.end());
      if (commands.empty()) break;
      for (const Command& command : commands) {
        if (command.kind == CommandKind::kUnpublish)
          brain.grace_done(command.model, command.layer, command.slot);
        if (command.kind == CommandKind::kRead)
          brain.read_done(command.model, command.layer, command.slot, ReadOutcome::kOk);
      }
    }
    brain.epoch_completed(LaneId(0), i + 1);
    const std::uint64_t now = brain.counters(ModelId(0))[0].hits;
    hits.push_back(now - before);
    before = now;
  }
  return hits;
}

TEST(GoldenCounts, AreWhatWasWorkedOutByHand) {
  const Steps steps = read_trace("eight_steps.csv");
  ASSERT_EQ(steps.size(), 8u);
  const auto expected = read_expected("eight_steps.expected");
  ASSERT_EQ(expected.size(), 3u);
  for (const auto& [policy, hits] : expected) EXPECT_EQ(replay(policy, steps), hits) << policy;
}

TEST(GoldenCounts, TellThePoliciesApart) {
  const auto expected = read_expected("eight_steps.expected");
  EXPECT_NE(expected.at("fifo"), expected.at("lru"));
  EXPECT_NE(expected.at("fifo"), expected.at("sieve"));
  EXPECT_NE(expected.at("lru"), expected.at("sieve"));
}

}  // namespace
}  // namespace moecached
