#include "daemon/model/shards.h"

#include <algorithm>

#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

std::vector<GgufImage> build_all(const std::vector<GgufBuilder>& builders) {
  std::vector<GgufImage> images;
  for (const GgufBuilder& builder : builders) images.push_back(builder.build());
  return images;
}

class Shards : public testing::Test {
 protected:
  void expect(std::initializer_list<std::string_view> words, FaultCode code = FaultCode::kInvalid) {
    expect_fault(layout_of(build_all(shards_)), code, words);
  }

  std::vector<GgufBuilder> shards_ = make_moe({.n_layers = 3}).split(3);
};

TEST_F(Shards, LayoutOfShardsIsThatOfTheWholeFileButForTheirPlaces) {
  const std::vector<GgufImage> images = build_all(shards_);
  auto split = layout_of(images);
  auto whole = layout_of(make_moe({.n_layers = 3}));
  ASSERT_TRUE(split) << split.error().text;
  ASSERT_TRUE(whole) << whole.error().text;
  EXPECT_EQ(split->n_files, 3u);
  EXPECT_EQ(split->expert_bytes_total, whole->expert_bytes_total);
  std::vector<std::uint64_t> bytes;
  for (const GgufImage& image : images) bytes.push_back(image.bytes.size());
  EXPECT_EQ(unsound(*split, bytes, 4096), "");
  std::vector<std::uint32_t> used;
  for (const LayerLayout& layer : whole->layers) {
    for (const PartLayout& want : layer.parts) {
      const PartLayout* got = find_part(*split, want.name);
      ASSERT_NE(got, nullptr) << want.name;
      EXPECT_EQ(got->expert_bytes, want.expert_bytes);
      EXPECT_EQ(got->file_offset, images[got->file].tensor_offsets.at(want.name)) << want.name;
      used.push_back(got->file);
    }
  }
  for (const std::uint32_t file : {0u, 1u, 2u}) EXPECT_TRUE(std::ranges::count(used, file) > 0) << file;
}

TEST_F(Shards, TheFirstMayHoldKeysAlone) {
  auto images = build_all(shards_);
  GgufBuilder first;
  std::vector<GgufBuilder> moved = make_moe({.n_layers = 3}).split(1);
  GgufBuilder keys_only = make_moe({.n_layers = 3});
  for (const auto& [name, offset] : keys_only.build().tensor_offsets) keys_only.remove_tensor(name);
  const auto n = static_cast<std::int32_t>(moved[0].build().tensor_offsets.size());
  keys_only.key_u16("split.no", 0).key_u16("split.count", 2).key_i32("split.tensors.count", n);
  moved[0].remove_key("split.no").remove_key("split.count").key_u16("split.no", 1).key_u16("split.count", 2);
  images = build_all({keys_only, moved[0]});
  images[0].bytes.resize(images[0].header_bytes);
  auto layout = layout_of(images);
  ASSERT_TRUE(layout) << layout.error().text;
  EXPECT_EQ(layout->layers.size(), 3u);
  EXPECT_EQ(layout->layers[0].parts[0].file, 1u);
}

TEST_F(Shards, SplitKeysMayHaveAnyIntegerType) {
  for (GgufBuilder& shard : shards_) shard.remove_key("split.count").key_u64("split.count", 3);
  EXPECT_TRUE(layout_of(build_all(shards_)));
}

TEST_F(Shards, ASplitOfOneIsAWholeFile) { EXPECT_TRUE(layout_of(build_all(make_moe({}).split(1)))); }

TEST_F(Shards, NoFileAtAll) { expect_fault(read_shards({}), FaultCode::kInvalid, {"no file"}); }

TEST_F(Shards, TooManyFiles) {
  const std::vector<int> fds(MOECACHED_MAX_FILES + 1, -1);
  expect_fault(read_shards(fds), FaultCode::kLimit,
               {std::to_string(fds.size()), std::to_string(fds.size() - 1)});
}

TEST_F(Shards, OneOfSeveralAlone) {
  shards_.resize(1);
  expect({"'split.count' is 3", "1 file"});
}

TEST_F(Shards, OneMissing) {
  shards_.pop_back();
  expect({"shard 1 of 2", "'split.count' is 3", "2 files"});
}

TEST_F(Shards, Swapped) {
  std::swap(shards_[1], shards_[2]);
  expect({"shard 2 of 3", "'split.no' is 2", "must be 1"});
}

TEST_F(Shards, NotStartingAtTheFirst) {
  std::swap(shards_[0], shards_[1]);
  expect({"shard 1 of 3", "'split.no' is 1", "must be 0"});
}

TEST_F(Shards, OneTwice) {
  shards_[2] = shards_[1];
  expect({"shard 3 of 3", "'split.no' is 1", "must be 2"});
}

TEST_F(Shards, AWholeFileAmongThem) {
  shards_[1] = make_moe({.n_layers = 3});
  expect({"shard 2 of 3", "'split.no' is missing"});
}

TEST_F(Shards, OfModelsWithOtherTensorCounts) {
  shards_[2] = make_moe({.n_layers = 4}).split(3)[2];
  expect({"shard 3 of 3", "'split.tensors.count' is 21", "16", "two models"});
}

TEST_F(Shards, OfModelsWithOtherArchitectures) {
  shards_[1].key_text("general.architecture", "qwen2moe");
  expect({"shard 2 of 3", "'qwen2moe'", "'qwen3moe'", "two models"});
}

TEST_F(Shards, WithFewerTensorsThanTheyPromise) {
  shards_[1].remove_tensor(shards_[1].build().tensor_offsets.begin()->first);
  expect({"'split.tensors.count' is 16", "15 tensors"});
}

TEST_F(Shards, WithOneTensorInTwo) {
  const std::string moved = shards_[1].build().tensor_offsets.begin()->first;
  shards_[2].tensor(moved, 0, {4});
  shards_[2].remove_tensor(shards_[2].build().tensor_offsets.rbegin()->first);
  expect({"'" + moved + "'", "shard 2", "shard 3"});
}

TEST_F(Shards, WithSplitKeysOfTheWrongTypeOrRange) {
  for (const char* key : {"split.no", "split.count", "split.tensors.count"}) {
    shards_ = make_moe({.n_layers = 3}).split(3);
    shards_[1].remove_key(key).key_text(key, "1");
    expect({"shard 2 of 3", key, "string"});
    shards_[1].remove_key(key).key_i32(key, -1);
    expect({"shard 2 of 3", key, "-1"});
    shards_[1].remove_key(key).key_u64(key, ~std::uint64_t{0});
    expect({"shard 2 of 3", key});
    shards_[1].remove_key(key);
    expect({"shard 2 of 3", key, "missing"});
  }
}

TEST_F(Shards, ABrokenOneIsNamed) {
  auto images = build_all(shards_);
  images[2].bytes.resize(images[2].header_bytes);
  expect_fault(layout_of(images), FaultCode::kInvalid, {"shard 3 of 3"});
}

}  // namespace
}  // namespace moecached::test
