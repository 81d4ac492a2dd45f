#include "daemon/warmth/imatrix.h"

#include <gmock/gmock.h>

#include <cstring>
#include <limits>

#include "tests/support/gguf_builder.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

void put_floats(test::GgufImage* image, const std::string& tensor, const std::vector<float>& values) {
  std::memcpy(image->bytes.data() + image->tensor_offsets.at(tensor), values.data(),
              values.size() * sizeof(float));
}

// As llama-imatrix writes it: sums and counts of every tensor that has an importance matrix.
test::GgufImage gguf_imatrix() {
  test::GgufBuilder builder;
  builder.key_text("general.type", "imatrix");
  for (const char* name : {"blk.0.attn_q.weight", "blk.1.ffn_down_exps.weight", "blk.1.ffn_gate_exps.weight",
                           "blk.2.ffn_up_exps.weight"}) {
    const std::uint64_t n = std::string_view(name).find("exps") == std::string_view::npos ? 1 : 4;
    builder.tensor(std::string(name) + ".in_sum2", 0, {8, n})
        .tensor(std::string(name) + ".counts", 0, {1, n});
  }
  test::GgufImage image = builder.build();
  put_floats(&image, "blk.1.ffn_down_exps.weight.counts", {10, 0, 30, 2});
  put_floats(&image, "blk.1.ffn_gate_exps.weight.counts", {10, 0, 30, 2});
  put_floats(&image, "blk.2.ffn_up_exps.weight.counts", {1, 2, 3, 4});
  return image;
}

Result<UseList> read(const test::GgufImage& image) {
  return read_imatrix_gguf(test::memory_file(image.bytes).get());
}

TEST(ImatrixGguf, GivesTheCountsOfExperts) {
  const auto list = read(gguf_imatrix());
  ASSERT_TRUE(list) << list.error().text;
  ASSERT_EQ(list->layers.size(), 2u);
  EXPECT_EQ(list->layers[0].block, 1u);
  EXPECT_THAT(list->layers[0].counts, ElementsAre(10, 0, 30, 2));
  EXPECT_EQ(list->layers[1].block, 2u);
  EXPECT_THAT(list->layers[1].counts, ElementsAre(1, 2, 3, 4));
}

TEST(ImatrixGguf, RefusesCountsThatAreNone) {
  for (const float bad :
       {-1.0F, 1e30F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    test::GgufImage image = gguf_imatrix();
    put_floats(&image, "blk.2.ffn_up_exps.weight.counts", {1, 2, bad, 4});
    const auto list = read(image);
    ASSERT_FALSE(list) << bad;
    EXPECT_THAT(list.error().text, HasSubstr("'blk.2.ffn_up_exps.weight.counts': the count of expert 2"));
  }
}

TEST(ImatrixGguf, ANameThatIsNoTextIsQuotedAsOne) {
  test::GgufBuilder builder;
  builder.tensor("blk.0.ffn_\xc6\n_exps.weight.counts", 0, {1, 2});
  test::GgufImage image = builder.build();
  put_floats(&image, image.tensor_offsets.begin()->first, {1, -1});
  EXPECT_THAT(read(image).error().text,
              HasSubstr("tensor 'blk.0.ffn_??_exps.weight.counts': the count of expert 1"));
}

TEST(ImatrixGguf, RefusesOtherShapesAndTypes) {
  test::GgufBuilder wide;
  wide.tensor("blk.0.ffn_up_exps.weight.counts", 0, {2, 4});
  EXPECT_THAT(read(wide.build()).error().text, HasSubstr("is not a row of F32 counts"));
  test::GgufBuilder many;
  many.tensor("blk.0.ffn_up_exps.weight.counts", 0, {1, 5000});
  EXPECT_EQ(read(many.build()).error().code, FaultCode::kLimit);
  test::GgufBuilder model = test::make_moe({});
  EXPECT_EQ(read(model.build()).error().code, FaultCode::kNotFound);
}

TEST(ImatrixGguf, RefusesEveryTruncation) {
  const test::GgufImage image = gguf_imatrix();
  const std::size_t end = image.tensor_offsets.at("blk.2.ffn_up_exps.weight.counts") + 4 * sizeof(float);
  for (std::size_t n = 0; n < end; n += 7) {
    test::GgufImage cut = image;
    cut.bytes.resize(n);
    EXPECT_FALSE(read(cut)) << n;
  }
}

// The legacy layout, word by word.
class Legacy {
 public:
  explicit Legacy(std::uint32_t n_entries) { word(n_entries); }
  Legacy& word(std::uint32_t value) { return raw(&value, sizeof value); }
  Legacy& entry(const std::string& name, const std::vector<float>& values) {
    word(static_cast<std::uint32_t>(name.size())).raw(name.data(), name.size());
    word(7).word(static_cast<std::uint32_t>(values.size()));
    return raw(values.data(), values.size() * sizeof(float));
  }
  Legacy& raw(const void* data, std::size_t n) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), from, from + n);
    return *this;
  }
  [[nodiscard]] Result<UseList> read() const {
    static constexpr BlockShape kShapes[] = {{.block = 0, .n_experts = 4}, {.block = 1, .n_experts = 4}};
    return read_imatrix_legacy(test::memory_file(bytes).get(), kShapes);
  }
  std::vector<std::byte> bytes;
};

const std::vector<float> kSums = {1, 3, 0, 0, 8, 8, 50, 50};  // of two channels of four experts

TEST(ImatrixLegacy, SumsStandForCounts) {
  Legacy file(3);
  file.entry("blk.0.attn_q.weight", {1, 2, 3}).entry("blk.0.ffn_down_exps.weight", kSums);
  file.entry("blk.0.ffn_gate_exps.weight", kSums).word(7);
  const auto list = file.read();
  ASSERT_TRUE(list) << list.error().text;
  ASSERT_EQ(list->layers.size(), 1u);
  const std::vector<std::uint64_t>& counts = list->layers[0].counts;
  ASSERT_EQ(counts.size(), 4u);
  EXPECT_EQ(counts[1], 0u);
  EXPECT_LT(counts[0], counts[2]);
  EXPECT_LT(counts[2], counts[3]);
}

TEST(ImatrixLegacy, MeansAreRefusedSinceTheySayNothingOfUse) {
  Legacy file(1);
  file.entry("blk.0.ffn_gate_exps.weight", {5, 5, 5.5, 5, 6, 5, 5, 5});
  const auto list = file.read();
  ASSERT_FALSE(list);
  EXPECT_EQ(list.error().code, FaultCode::kUnsupported);
  EXPECT_THAT(list.error().text, HasSubstr("means"));
}

TEST(ImatrixLegacy, LyingLengthsAreRefusedByName) {
  EXPECT_THAT(Legacy(0).read().error().text, HasSubstr("number of entries is 0"));
  EXPECT_THAT(Legacy(0xffffffff).read().error().text, HasSubstr("number of entries"));
  EXPECT_THAT(Legacy(1).word(0xffffffff).read().error().text, HasSubstr("entry 1 of 1: its name has"));
  Legacy values(1);
  values.word(1).raw("x", 1).word(1).word(0xffffffff);
  EXPECT_THAT(values.read().error().text, HasSubstr("4294967295 values take"));
  Legacy odd(1);
  odd.entry("blk.0.ffn_gate_exps.weight", {1, 2, 3});
  EXPECT_THAT(odd.read().error().text, HasSubstr("3 values are not those of 4 experts"));
  Legacy negative(1);
  negative.entry("blk.1.ffn_gate_exps.weight", {1, 1, -1, 1});
  EXPECT_THAT(negative.read().error().text, HasSubstr("of expert 2"));
  Legacy others(1);
  others.entry("blk.9.ffn_gate_exps.weight", kSums);
  EXPECT_EQ(others.read().error().code, FaultCode::kNotFound);
}

TEST(ImatrixLegacy, RefusesEveryTruncation) {
  Legacy file(2);
  file.entry("blk.0.ffn_gate_exps.weight", kSums).entry("blk.1.ffn_gate_exps.weight", kSums);
  ASSERT_TRUE(file.read());
  const std::vector<std::byte> whole = file.bytes;
  for (std::size_t n = 0; n < whole.size(); ++n) {
    file.bytes.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(n));
    EXPECT_FALSE(file.read()) << n;
  }
}

}  // namespace
}  // namespace moecached
