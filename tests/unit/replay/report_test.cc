#include "bench/replay/report.h"

#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/replay/svg.h"

namespace moecached::replay {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(LayerUse, OfEqualCounts) {
  const LayerUse use = use_of_counts(std::vector<std::uint64_t>(16, 5));
  EXPECT_NEAR(use.gini, 0, 1e-12);
  EXPECT_NEAR(use.entropy_bits, 4, 1e-12);
  EXPECT_EQ(use.n_used, 16u);
}

TEST(LayerUse, OfOneThatHasEverything) {
  const LayerUse use = use_of_counts(std::vector<std::uint64_t>{0, 0, 8, 0});
  EXPECT_NEAR(use.gini, 0.75, 1e-12);
  EXPECT_NEAR(use.entropy_bits, 0, 1e-12);
  EXPECT_EQ(use.n_used, 1u);
}

TEST(LayerUse, ByHand) {
  // Half of the mean absolute difference of all pairs, over the mean: (0 + 2 + 2 + 0) / 4 / 2 / 2.
  const std::vector<std::uint64_t> counts = {1, 3};
  const LayerUse use = use_of_counts(counts);
  EXPECT_NEAR(use.gini, 0.25, 1e-12);
  EXPECT_NEAR(use.entropy_bits, -0.25 * std::log2(0.25) - 0.75 * std::log2(0.75), 1e-12);
}

TraceHeader header_of(std::uint32_t n_experts, std::uint32_t k) {
  TraceHeader header;
  header.model = "a <b> & \"c\"";
  header.n_layers = 2;
  header.n_experts = n_experts;
  header.k = header.n_used = k;
  return header;
}

TEST(SlotChoice, SharesCountsAndRecorded) {
  TraceHeader header = header_of(32, 4);
  header.n_slots = {7, 9};
  const auto sizes = parse_slots("12.5%,8,recorded", header);
  ASSERT_TRUE(sizes) << sizes.error().text;
  EXPECT_THAT((*sizes)[0].n_slots, ElementsAre(4, 4));
  EXPECT_THAT((*sizes)[1].n_slots, ElementsAre(8, 8));
  EXPECT_NEAR((*sizes)[1].share, 0.25, 1e-12);
  EXPECT_THAT((*sizes)[2].n_slots, ElementsAre(7, 9));
  EXPECT_THAT(private_part((*sizes)[1], 2, header), ElementsAre(4, 4));
  EXPECT_TRUE(private_part((*sizes)[1], 4, header).empty());
  for (const char* bad : {"", "0", "33", "2.5", "101%", "-5%", "x", "8,", "8 "}) {
    const auto result = parse_slots(bad, header);
    ASSERT_FALSE(result) << bad;
    EXPECT_THAT(result.error().text, HasSubstr("--slots"));
  }
  header.n_slots.clear();
  EXPECT_FALSE(parse_slots("recorded", header));
}

Report report_of(const std::vector<std::pair<std::uint32_t, std::uint64_t>>& hits_of_slots) {
  Report report;
  report.header = header_of(32, 4);
  for (const auto& [n_slots, hits] : hits_of_slots) {
    Run run;
    run.policy = "lru";
    run.slots = {std::to_string(n_slots), n_slots / 32.0, {n_slots, n_slots}};
    run.result.decode = {.rows = 10, .lookups = 1000, .hits = hits, .insertions = 1000 - hits};
    run.result.layers.resize(2);
    report.runs.push_back(run);
    report.yardsticks.push_back({run.slots, 1, false, {10, 1000, 900, 100}, {10, 1000, 950, 50}});
  }
  return report;
}

TEST(Advice, SaysWhenAPoolIsTooSmallAndWhenItIsPastTheKnee) {
  const std::vector<std::string> lines = advice(report_of({{16, 900}, {4, 300}, {8, 700}, {32, 905}}));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("4 slots are fewer than twice the 4 experts"));
  EXPECT_THAT(lines[1], HasSubstr("32 is past the knee"));
  EXPECT_TRUE(advice(report_of({{8, 700}, {16, 900}})).empty());
}

TEST(Report, RatiosAreOfTheYardstickOfTheSameSize) {
  const auto json = to_json(report_of({{8, 450}}));
  EXPECT_NEAR(json["runs"][0]["of_belady"].get<double>(), 0.5, 1e-9);
  EXPECT_NEAR(json["runs"][0]["of_bypass"].get<double>(), 450.0 / 950, 1e-9);
  EXPECT_NEAR(json["runs"][0]["total"]["hit_rate"].get<double>(), 0.45, 1e-9);
  EXPECT_NEAR(json["runs"][0]["total"]["link_experts_per_access"].get<double>(), 0.55, 1e-9);
  Report covered = report_of({{8, 450}});
  covered.mode = Mode::kCovered;
  covered.expert_bytes = 1000;
  EXPECT_NEAR(to_json(covered)["runs"][0]["total"]["link_bytes_per_access"].get<double>(), 1100, 1e-6);
}

TEST(Svg, HasALineAPolicyAndTwoYardsticksAndEscapesNames) {
  const std::string svg = to_svg(report_of({{4, 300}, {8, 700}, {16, 900}}));
  std::size_t lines = 0;
  for (std::size_t at = svg.find("<polyline"); at != std::string::npos; at = svg.find("<polyline", at + 1))
    ++lines;
  EXPECT_EQ(lines, 3u);
  EXPECT_THAT(svg, HasSubstr("a &lt;b&gt; &amp; &quot;c&quot;"));
  EXPECT_THAT(svg, Not(HasSubstr("a <b>")));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
}

TEST(Report, NamesTheScopeWhereLayersTradeSlots) {
  Report report;
  report.header = header_of(32, 4);
  replay::Run run;
  run.policy = "lru";
  run.slots = {.label = "50 %", .share = 0.5, .n_slots = {16, 16}};
  run.result.layers.resize(2);
  run.result.n_slots = {16, 16};
  report.runs.push_back(run);
  EXPECT_THAT(to_table(report), Not(HasSubstr("scope")));
  EXPECT_EQ(to_json(report)["runs"][0]["scope"], "layer");
  run.scope = SlotScope::kGlobal;
  run.result.n_slots = {12, 20};
  report.runs.push_back(run);
  report.use.resize(2);
  EXPECT_THAT(to_table(report),
              testing::AllOf(HasSubstr("scope"), HasSubstr("global"), HasSubstr("lru 50 % global"),
                             HasSubstr("(12)"), HasSubstr("(20)")));
  const auto json = to_json(report);
  EXPECT_EQ(json["runs"][1]["scope"], "global");
  EXPECT_EQ(json["runs"][1]["layers"][1]["slots"], 20);
}

}  // namespace
}  // namespace moecached::replay
