#include "bench/replay/trace.h"

#include <gmock/gmock.h>
#include <unistd.h>
#include <zstd.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace moecached::replay {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kHeader =
    "# moetrace-csv v1 {\"model\":\"m\",\"layers\":2,\"experts\":8,\"k\":2,\"license\":\"MIT\"}\n"
    "seq,tok,phase,L0_0,L0_1,L1_0,L1_1\n";

class TraceTest : public testing::Test {
 protected:
  TraceTest() : path_("/tmp/moecached-trace-" + std::to_string(::getpid())) {}
  ~TraceTest() override { std::remove(path_.c_str()); }
  void write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }
  Result<Trace> read(const std::string& text, Trace::ReadLimits limits = {}) const {
    write(text);
    return Trace::read(path_, limits);
  }
  static std::string compressed(const std::string& text) {
    std::string out(ZSTD_compressBound(text.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
    return out;
  }
  const std::string path_;
};

TEST_F(TraceTest, RowsAndWhatIsMissing) {
  const Result<Trace> trace = read(std::string(kHeader) + "5,0,0,1,2,3,-1\r\n7,1,1,-1,4,-1,-1");
  ASSERT_TRUE(trace) << trace.error().text;
  EXPECT_EQ(trace->header().model, "m");
  EXPECT_EQ(trace->header().licence, "MIT");
  ASSERT_EQ(trace->size(), 2u);
  EXPECT_FALSE(trace->row(0).is_decode);
  EXPECT_TRUE(trace->row(1).is_decode);
  EXPECT_EQ(trace->row(1).seq, 7);
  EXPECT_EQ(trace->n_sequences(), 2u);
  EXPECT_THAT(trace->event(0, 0), ElementsAre(1, 2));
  EXPECT_THAT(trace->event(0, 1), ElementsAre(3));
  EXPECT_THAT(trace->event(1, 0), ElementsAre(4));
  EXPECT_TRUE(trace->event(1, 1).empty());
}

TEST_F(TraceTest, ZstdIsToldByItsBytesAndReadsTheSame) {
  std::string text = kHeader;
  for (int i = 0; i < 50'000; ++i)  // several buffers long, so that lines lie across them
    text += "0," + std::to_string(i) + ",1," + std::to_string(i % 8) + "," + std::to_string((i + 1) % 8) +
            ",3,4\n";
  const Result<Trace> plain = read(text);
  ASSERT_TRUE(plain) << plain.error().text;
  const Result<Trace> packed = read(compressed(text));
  ASSERT_TRUE(packed) << packed.error().text;
  ASSERT_EQ(packed->size(), 50'000u);
  for (std::size_t row = 0; row < packed->size(); ++row) {
    ASSERT_EQ(packed->row(row).tok, static_cast<std::int64_t>(row));
    ASSERT_THAT(packed->event(row, 0), ElementsAre(row % 8, (row + 1) % 8));
    ASSERT_THAT(plain->event(row, 0), ElementsAre(row % 8, (row + 1) % 8));
  }
}

TEST_F(TraceTest, ZstdThatWasCutOffOrDamagedIsNamed) {
  std::string packed = compressed(std::string(kHeader) + "0,0,1,1,2,3,4\n");
  const Result<Trace> cut = read(packed.substr(0, packed.size() - 3));
  ASSERT_FALSE(cut);
  EXPECT_THAT(cut.error().text, HasSubstr("cut off"));
  packed[packed.size() / 2] = static_cast<char>(packed[packed.size() / 2] ^ 0x5a);
  packed[8] = static_cast<char>(packed[8] ^ 0xff);
  EXPECT_FALSE(read(packed));
}

TEST_F(TraceTest, MoreThanIsAllowedIsALimitWithTheOptionToRaise) {
  std::string text = kHeader;
  for (int i = 0; i < 100; ++i) text += "0,0,1,1,2,3,4\n";
  const Result<Trace> trace = read(text, {.bytes = 1000});
  ASSERT_FALSE(trace);
  EXPECT_EQ(trace.error().code, FaultCode::kLimit);
  EXPECT_THAT(trace.error().text, HasSubstr("--memory"));
}

TEST_F(TraceTest, MissingFileIsNamed) {
  const Result<Trace> trace = Trace::read("/nowhere/at-all.csv", {});
  ASSERT_FALSE(trace);
  EXPECT_THAT(trace.error().text, HasSubstr("/nowhere/at-all.csv"));
}

struct Bad {
  std::string text;
  std::string says;
};
class BadTraceTest : public TraceTest, public testing::WithParamInterface<Bad> {};

TEST_P(BadTraceTest, IsNamedByLineAndColumn) {
  const Result<Trace> trace = read(GetParam().text);
  ASSERT_FALSE(trace);
  EXPECT_THAT(trace.error().text, HasSubstr(GetParam().says));
  EXPECT_THAT(trace.error().text, HasSubstr(path_));
}

std::string with_rows(const std::string& rows) { return std::string(kHeader) + "0,0,1,1,2,3,4\n" + rows; }

INSTANTIATE_TEST_SUITE_P(
    Files, BadTraceTest,
    testing::Values(
        Bad{"", "empty"}, Bad{"layer,expert\n", "line 1: it begins with \"layer,expert\""},
        Bad{"# moetrace-csv v1 {\"layers\":2,\n", "no JSON object"},
        Bad{"# moetrace-csv v1 {\"layers\":2,\"experts\":8}\n", "\"k\" must be a whole number"},
        Bad{"# moetrace-csv v1 {\"layers\":0,\"experts\":8,\"k\":2}\n", "\"layers\" must be"},
        Bad{"# moetrace-csv v1 {\"layers\":2,\"experts\":99999,\"k\":2}\n", "\"experts\" must be"},
        Bad{"# moetrace-csv v1 {\"layers\":1,\"experts\":8,\"k\":1,\"slots\":[9]}\n", "\"slots\": 9"},
        Bad{"# moetrace-csv v1 {\"layers\":1,\"experts\":8,\"k\":1,\"slots\":[1,2]}\n",
            "one number for each"},
        Bad{"# moetrace-csv v1 {\"layers\":1,\"experts\":8,\"k\":1}\n", "no line 2"},
        Bad{"# moetrace-csv v1 {\"layers\":2,\"experts\":8,\"k\":2}\nseq,tok,phase,L0_0,L1_0\n",
            "line 2: column 5 is \"L1_0\""},
        Bad{"# moetrace-csv v1 {\"layers\":1,\"experts\":8,\"k\":1}\nseq,tok,phase,L0_0,L1_0\n",
            "more columns"},
        Bad{std::string(kHeader), "no row"},
        Bad{with_rows("0,1,1,1,2,3\n"), "line 4: column 7 (L1_1): the row ends here"},
        Bad{with_rows("0,1,1,1,2,3,4,5\n"), "line 4: column 7 (L1_1): more columns"},
        Bad{with_rows("0,1,1,1,2,x,4\n"), "line 4: column 6 (L1_0): \"x\" is no whole number"},
        Bad{with_rows("0,1,1,1,2,3.5,4\n"), "column 6 (L1_0)"},
        Bad{with_rows("0,1,1,1,8,3,4\n"), "line 4: column 5 (L0_1): 8 is no expert"},
        Bad{with_rows("0,1,1,1,-2,3,4\n"), "-2 is no expert"},
        Bad{with_rows("0,1,1,1,99999999999999999999,3,4\n"), "is no whole number"},
        Bad{with_rows("0,1,1,1,1,3,4\n"), "line 4: column 5 (L0_1): expert 1 is named twice"},
        Bad{with_rows("0,1,2,1,2,3,4\n"), "column 3 (phase): 2 is no phase"}));

}  // namespace
}  // namespace moecached::replay
