// Events to rows, rows to a file, and the file back through the simulator's reader.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/replay/trace.h"
#include "client/ctl/trace_file.h"
#include "client/ctl/trace_rows.h"

namespace moecached::ctl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

control::v1::RoutingEvent event(std::uint64_t lane, std::uint32_t layer, std::vector<std::uint32_t> experts,
                                std::uint32_t n_tokens = 1) {
  control::v1::RoutingEvent out;
  out.set_lane(lane);
  out.set_layer(layer);
  out.set_n_tokens(n_tokens);
  for (const std::uint32_t expert : experts) out.add_experts(expert);
  return out;
}

class TraceRowsTest : public testing::Test {
 protected:
  std::vector<TraceRow> rows_;
  TraceRows assembler_{2, [this](const TraceRow& row) { rows_.push_back(row); }};
};

TEST_F(TraceRowsTest, ARowEndsWhenItsLaneGoesBack) {
  assembler_.add(event(7, 0, {1, 2}));
  assembler_.add(event(7, 1, {3}));
  EXPECT_THAT(rows_, IsEmpty());
  assembler_.add(event(7, 0, {4}));
  ASSERT_EQ(rows_.size(), 1u);
  assembler_.finish();
  ASSERT_EQ(rows_.size(), 2u);
  EXPECT_THAT(rows_[0].experts, ElementsAre(ElementsAre(1, 2), ElementsAre(3)));
  EXPECT_THAT(rows_[1].experts, ElementsAre(ElementsAre(4), IsEmpty()));
  EXPECT_EQ(rows_[1].tok, 1u);
  EXPECT_EQ(assembler_.n_sequences(), 1u);
}

TEST_F(TraceRowsTest, LanesDoNotMixAndAreNumberedAsTheyCome) {
  assembler_.add(event(70, 0, {1}));
  assembler_.add(event(50, 0, {2}));
  assembler_.add(event(70, 1, {3}));
  assembler_.add(event(50, 1, {4}));
  assembler_.add(event(50, 0, {5}));
  assembler_.add(event(70, 0, {6}));
  ASSERT_EQ(rows_.size(), 2u);
  EXPECT_EQ(rows_[0].seq, 0u);
  EXPECT_THAT(rows_[0].experts, ElementsAre(ElementsAre(1), ElementsAre(3)));
  EXPECT_EQ(rows_[1].seq, 1u);
  EXPECT_THAT(rows_[1].experts, ElementsAre(ElementsAre(2), ElementsAre(4)));
}

TEST_F(TraceRowsTest, ARowThatWaitsForItsEndIsWrittenBeforeThoseThatCameAfterIt) {
  assembler_.add(event(1, 0, {1}));
  assembler_.add(event(1, 1, {2}));  // the last that lane 1 does
  for (std::uint32_t token = 0; token < 3; ++token) {
    assembler_.add(event(2, 0, {3}));
    assembler_.add(event(2, 1, {4}));
  }
  assembler_.finish();
  ASSERT_EQ(rows_.size(), 4u);
  EXPECT_EQ(rows_[0].seq, 0u);
}

TEST_F(TraceRowsTest, ALaneThatOvertakesAnotherSplitsARow) {
  assembler_.add(event(1, 0, {1}));
  assembler_.add(event(2, 0, {2}));
  assembler_.add(event(2, 1, {3}));
  assembler_.add(event(1, 1, {4}));  // before lane 2 in layer 0, behind it in layer 1
  assembler_.add(event(1, 0, {5}));
  assembler_.finish();
  ASSERT_EQ(rows_.size(), 4u);
  EXPECT_THAT(rows_[0].experts, ElementsAre(ElementsAre(1), IsEmpty()));
  EXPECT_THAT(rows_[1].experts, ElementsAre(ElementsAre(2), ElementsAre(3)));
  EXPECT_THAT(rows_[2].experts, ElementsAre(IsEmpty(), ElementsAre(4)));
  EXPECT_EQ(rows_[0].tok, 0u);
  EXPECT_EQ(rows_[2].tok, 0u);
  EXPECT_EQ(rows_[3].tok, 1u);
}

TEST(TraceRows, EventsOfALayerKeepTheirOrderHoweverLanesInterleave) {
  constexpr std::uint32_t kLayers = 5, kLanes = 6;
  std::mt19937 random(3);
  std::vector<std::vector<std::uint32_t>> put(kLayers), got(kLayers);
  TraceRows assembler(kLayers, [&](const TraceRow& row) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (const std::uint16_t expert : row.experts[layer]) got[layer].push_back(expert);
    }
  });
  std::uint32_t at[kLanes] = {};
  for (std::uint32_t i = 0; i < 20'000; ++i) {
    const auto lane = static_cast<std::uint32_t>(random() % kLanes);
    const std::uint32_t layer = at[lane]++ % kLayers;
    put[layer].push_back(i % 60'000);
    ASSERT_TRUE(assembler.add(event(lane, layer, {i % 60'000})));
  }
  assembler.finish();
  EXPECT_EQ(put, got);
}

TEST_F(TraceRowsTest, ABatchIsOneRowThatCountsForItsTokens) {
  assembler_.add(event(1, 0, {1, 2, 3}, 5));
  assembler_.add(event(1, 1, {4}, 1));  // the last layer computes only what is put out
  assembler_.add(event(1, 0, {5}));
  assembler_.finish();
  ASSERT_EQ(rows_.size(), 2u);
  EXPECT_EQ(rows_[0].n_tokens, 5u);
  EXPECT_EQ(rows_[1].tok, 5u);
}

TEST_F(TraceRowsTest, TokensOfAGraphAreTheirOwnRows) {
  const auto of_graph = [](std::uint64_t graph, std::uint32_t layer, std::uint32_t token,
                           std::uint32_t expert) {
    auto out = event(1, layer, {expert}, 2);
    out.set_graph(graph);
    out.set_token(token);
    out.set_prefill(graph == 1);
    return out;
  };
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    for (std::uint32_t token = 0; token < 2; ++token)
      assembler_.add(of_graph(1, layer, token, 10 * token + layer));
  }
  // The next graph's layer 0 was not told: its first layer is higher than none, but the graph is another.
  assembler_.add(of_graph(2, 1, 0, 30));
  assembler_.finish();
  ASSERT_EQ(rows_.size(), 3u);
  EXPECT_THAT(rows_[0].experts, ElementsAre(ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(rows_[1].experts, ElementsAre(ElementsAre(10), ElementsAre(11)));
  EXPECT_THAT(rows_[2].experts, ElementsAre(IsEmpty(), ElementsAre(30)));
  EXPECT_EQ(rows_[1].tok, 1u);
  EXPECT_EQ(rows_[2].tok, 2u);
  EXPECT_TRUE(rows_[1].prefill);
  EXPECT_FALSE(rows_[2].prefill);
}

TEST_F(TraceRowsTest, ALayerThatIsNotThereIsRefused) {
  EXPECT_FALSE(assembler_.add(event(1, 2, {1})));
  assembler_.finish();
  EXPECT_THAT(rows_, IsEmpty());
}

TEST_F(TraceRowsTest, TooManyLanesForgetTheOneThatWasSilentForLongest) {
  for (std::uint64_t lane = 0; lane <= TraceRows::kLanesMax; ++lane) assembler_.add(event(lane, 0, {1}));
  ASSERT_EQ(rows_.size(), 1u);
  EXPECT_EQ(rows_[0].seq, 0u);
}

class TraceFileTest : public testing::TestWithParam<const char*> {
 protected:
  TraceFileTest() : path_("/tmp/moecached-ctl-" + std::to_string(::getpid()) + GetParam()) {}
  ~TraceFileTest() override { std::filesystem::remove(path_); }
  const std::string path_;
};

TEST_P(TraceFileTest, IsReadBackAsItWasWritten) {
  TraceFile file(path_, 2, 2);
  ASSERT_FALSE(file.open());
  for (std::uint64_t i = 0; i < 30'000; ++i) {
    TraceRow row{.seq = 3, .tok = i, .n_tokens = 1, .prefill = i % 2 == 0, .experts = {{1, 2}, {}}};
    if (i == 17) row.experts[1] = {5, 6, 7};  // wider than a token
    file.add(row);
  }
  EXPECT_FALSE(std::filesystem::exists(path_));  // it appears whole, or not at all
  const auto problem = file.close(
      {{"model", "m\xff"}, {"layers", 2}, {"experts", 8}, {"k_used", 2}, {"slots", {3, 4}}, {"dropped", 6}});
  ASSERT_FALSE(problem) << *problem;
  const auto trace = replay::Trace::read(path_, {});
  ASSERT_TRUE(trace) << trace.error().text;
  EXPECT_EQ(trace->header().k, 3u);
  EXPECT_EQ(trace->header().n_used, 2u);
  EXPECT_EQ(trace->header().dropped, 6u);
  EXPECT_THAT(trace->header().n_slots, ElementsAre(3, 4));
  ASSERT_EQ(trace->size(), 30'000u);
  EXPECT_THAT(trace->event(17, 1), ElementsAre(5, 6, 7));
  EXPECT_TRUE(trace->event(18, 1).empty());
  for (std::size_t row = 0; row < trace->size(); ++row) {
    ASSERT_EQ(trace->row(row).tok, static_cast<std::int64_t>(row));
    ASSERT_EQ(trace->row(row).is_decode, row % 2 != 0);
    ASSERT_THAT(trace->event(row, 0), ElementsAre(1, 2));
  }
  // Nothing is left beside it.
  for (const auto& entry : std::filesystem::directory_iterator("/tmp"))
    EXPECT_TRUE(!entry.path().string().starts_with(path_) || entry.path() == path_) << entry.path();
}

INSTANTIATE_TEST_SUITE_P(PlainAndPacked, TraceFileTest, testing::Values(".csv", ".csv.zst"));

TEST(TraceFile, SaysWhereItCannotWrite) {
  TraceFile file("/nowhere/at/all.csv", 1, 1);
  const auto problem = file.open();
  ASSERT_TRUE(problem);
  EXPECT_THAT(*problem, HasSubstr("/nowhere/at/all.csv"));
}

}  // namespace
}  // namespace moecached::ctl
