// Models whose keys and tensors contradict each other.
#include <unistd.h>

#include "daemon/model/model_layout.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

constexpr const char* kCount = "qwen3moe.expert_count";
constexpr const char* kUsed = "qwen3moe.expert_used_count";

class ModelLayoutFaults : public testing::Test {
 protected:
  void expect(std::initializer_list<std::string_view> words, FaultCode code = FaultCode::kInvalid) {
    expect_fault(layout_of(builder_), code, words);
  }
  void replace(const char* tensor, std::uint32_t type, std::vector<std::uint64_t> ne) {
    builder_.remove_tensor(tensor).tensor(tensor, type, std::move(ne));
  }

  GgufBuilder builder_ = make_moe({.biases = true});
};

TEST_F(ModelLayoutFaults, UndamagedModelIsRead) { EXPECT_TRUE(layout_of(builder_)); }

TEST_F(ModelLayoutFaults, NoArchitecture) {
  builder_.remove_key("general.architecture");
  expect({"'general.architecture' is missing"});
}

TEST_F(ModelLayoutFaults, ArchitectureThatIsNoName) {
  builder_.remove_key("general.architecture").key_u32("general.architecture", 7);
  expect({"'general.architecture'", "string"});
  for (const std::string& text : {std::string(), std::string(2000, 'x'), std::string("a\nb")}) {
    builder_.remove_key("general.architecture").key_text("general.architecture", text);
    expect({"'general.architecture'", "printable"});
  }
}

TEST_F(ModelLayoutFaults, NoExpertCount) {
  builder_.remove_key(kCount);
  expect({kCount, "missing"});
}

TEST_F(ModelLayoutFaults, NoExpertUsedCount) {
  builder_.remove_key(kUsed);
  expect({kUsed, "missing"});
}

TEST_F(ModelLayoutFaults, KeysOfAnotherArchitectureDoNotCount) {
  builder_.remove_key("general.architecture").key_text("general.architecture", "glm4moe");
  expect({"'glm4moe.expert_count' is missing"});
}

TEST_F(ModelLayoutFaults, ExpertCountThatTheTensorsDoNotHave) {
  builder_.remove_key(kCount).key_u32(kCount, 5);
  expect({"'blk.0.ffn_gate_exps.weight' has 4 experts", kCount, "says 5"});
}

TEST_F(ModelLayoutFaults, ExpertCountOutOfRange) {
  for (const std::uint32_t count : {0u, 4097u, 0xffffffffu}) {
    builder_.remove_key(kCount).key_u32(kCount, count);
    expect({kCount, std::to_string(count), "4096"});
  }
}

TEST_F(ModelLayoutFaults, CountsOfTheWrongType) {
  builder_.remove_key(kCount).key_f32(kCount, 4.0f);
  expect({kCount, "float32"});
  builder_.remove_key(kCount).key_texts(kCount, {"4", "4"});
  expect({kCount, "array of 2 string"});
  builder_.remove_key(kCount).key_u32s(kCount, std::vector<std::uint32_t>(5000, 4));
  expect({kCount, "array of 5000 uint32"});
}

TEST_F(ModelLayoutFaults, CountsByBlockThatDoNotReachTheBlock) {
  builder_.remove_key(kCount).key_u32s(kCount, {4});
  expect({kCount, "has 1 elements", "block 1"});
  builder_.remove_key(kCount).key_u32s(kCount, {});
  expect({kCount, "has 0 elements", "block 0"});
}

TEST_F(ModelLayoutFaults, CountsByBlockThatMakeNoSense) {
  builder_.remove_key(kCount).key_u32s(kCount, {4, 0});
  expect({kCount, "is 0 for block 1"});
  builder_.remove_key(kCount).key_i32s(kCount, {4, -4});
  expect({kCount, "is -4 for block 1"});
  builder_.remove_key(kCount).key_u32s(kCount, {4, 6});
  expect({"'blk.1.ffn_gate_exps.weight' has 4 experts", "says 6"});
}

TEST_F(ModelLayoutFaults, MoreExpertsUsedThanThereAre) {
  builder_.remove_key(kUsed).key_u32(kUsed, 5);
  expect({kUsed, "is 5", "4 experts"});
  builder_.remove_key(kUsed).key_u32(kUsed, 0);
  expect({kUsed, "is 0"});
}

TEST_F(ModelLayoutFaults, PartsOfOneLayerWithDifferentExpertCounts) {
  replace("blk.1.ffn_down_exps.weight", 8, {32, 64, 3});
  expect({"'blk.1.ffn_down_exps.weight' has 3 experts", "'blk.1.ffn_gate_exps.weight'", "has 4"});
}

TEST_F(ModelLayoutFaults, ABiasWithAnotherExpertCount) {
  replace("blk.1.ffn_up_exps.bias", 0, {32, 5});
  expect({"'blk.1.ffn_up_exps.bias' has 5 experts", "has 4"});
}

TEST_F(ModelLayoutFaults, ABiasThatDoesNotFitItsWeight) {
  replace("blk.0.ffn_down_exps.bias", 0, {32, 4});
  expect({"'blk.0.ffn_down_exps.bias' has 32 values", "64 rows"});
}

TEST_F(ModelLayoutFaults, ATransposedBias) {
  replace("blk.0.ffn_up_exps.bias", 0, {4, 32});
  expect({"'blk.0.ffn_up_exps.bias'"});
}

TEST_F(ModelLayoutFaults, WeightsWithTooManyDimensions) {
  replace("blk.0.ffn_up_exps.weight", 8, {64, 32, 4, 2});
  expect({"'blk.0.ffn_up_exps.weight' has 2 elements in dimension 3", "must be 1"});
}

TEST_F(ModelLayoutFaults, ABiasWithTooManyDimensions) {
  replace("blk.0.ffn_up_exps.bias", 0, {32, 4, 2});
  expect({"'blk.0.ffn_up_exps.bias' has 2 elements in dimension 2"});
}

TEST_F(ModelLayoutFaults, WeightsWithoutAnExpertDimension) {
  replace("blk.0.ffn_gate_exps.weight", 8, {64, 32});
  expect({"'blk.0.ffn_gate_exps.weight' has 1 experts", "says 4"});
}

TEST_F(ModelLayoutFaults, WeightsWithoutElements) {
  replace("blk.0.ffn_up_exps.weight", 8, {64, 0, 4});
  expect({"'blk.0.ffn_up_exps.weight' has 0 elements in dimension 1"});
  replace("blk.0.ffn_up_exps.weight", 8, {64, 32, 0});
  expect({"'blk.0.ffn_up_exps.weight' has 0 elements in dimension 2"});
}

TEST_F(ModelLayoutFaults, MoreLayersThanTheSharedLayoutHolds) {
  builder_ = make_moe({.n_layers = MOECACHED_MAX_LAYERS + 1,
                       .n_experts = 1,
                       .n_expert_used = 1,
                       .n_embd = 1,
                       .n_ff = 1,
                       .gate_type = 0,
                       .up_type = 0,
                       .down_type = 0});
  expect({"4097 blocks", "4096"}, FaultCode::kLimit);
}

TEST_F(ModelLayoutFaults, AlignmentThatIsNoPowerOfTwo) {
  expect_fault(layout_of(builder_, 3000), FaultCode::kInvalid, {"3000", "power of two"});
}

TEST_F(ModelLayoutFaults, ExpertsOfMoreThan64BitsOfBytes) {
  // Six parts of 2^62 bytes, each alone in a sparse shard: every one is fine, four together are not.
  constexpr std::uint64_t kRows = std::uint64_t{1} << 52;
  const char* names[] = {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
                         "blk.0.ffn_down_exps.weight", "blk.1.ffn_gate_exps.weight",
                         "blk.1.ffn_up_exps.weight",   "blk.1.ffn_down_exps.weight"};
  GgufBuilder whole;
  whole.key_text("general.architecture", "qwen3moe").key_u32(kCount, 4).key_u32(kUsed, 2);
  for (const char* name : names) whole.tensor(name, 0, {64, 1, 4});
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  std::size_t shard = 0;
  for (const GgufBuilder& builder : whole.split(6)) {
    GgufImage image = builder.build();
    image.put_u64("tensor " + std::string(names[shard++]) + " ne1", kRows);
    files.push_back(memory_file(image.bytes));
    fds.push_back(files.back().get());
    if (::ftruncate(fds.back(), (off_t{1} << 62) + 65536) != 0)
      GTEST_SKIP() << "no sparse files of 2^62 bytes here";
  }
  expect_fault(read_model_layout(fds, {}), FaultCode::kInvalid, {"'blk.1.ffn_gate_exps.weight'", "2^64"});
}

}  // namespace
}  // namespace moecached::test
