#include "daemon/model/hf_files.h"

#include <unistd.h>

#include "tests/support/safetensors_builder.h"
#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

Result<std::optional<SafetensorsIndex>> index_of(std::string_view text) {
  const UniqueFd fd = memory_file(bytes_of(text));
  return read_safetensors_index(fd.get());
}
Result<HfConfig> config_of(std::string_view text) {
  const UniqueFd fd = memory_file(bytes_of(text));
  return read_hf_config(fd.get());
}

TEST(SafetensorsIndex, SaysWhichTensorsShareAFile) {
  auto index = index_of(R"({"metadata": {"total_size": 12, "deep": [{"weight_map": 1}]},
                            "weight_map": {"b": "two", "a": "one", "c": "two"}, "other": {"x": {"y": null}}})");
  ASSERT_TRUE(index) << index.error().text;
  ASSERT_TRUE(*index);
  EXPECT_EQ((*index)->n_files, 2u);
  ASSERT_EQ((*index)->entries.size(), 3u);
  EXPECT_EQ((*index)->entries[0].tensor, "a");
  EXPECT_EQ((*index)->entries[1].file, (*index)->entries[2].file);
  EXPECT_NE((*index)->entries[0].file, (*index)->entries[1].file);
}

TEST(SafetensorsIndex, OtherJsonIsNone) {
  for (const char* text :
       {R"({"model_type": "x"})", "{}", "[]", R"([{"weight_map": {}}])", R"({"a": {"weight_map": {}}})"}) {
    auto index = index_of(text);
    ASSERT_TRUE(index) << text << ": " << index.error().text;
    EXPECT_FALSE(*index) << text;
  }
}

TEST(SafetensorsIndex, HostileOnesAreRefused) {
  for (const char* text :
       {"", "7", "{", R"({"weight_map": 7})", R"({"weight_map": "x"})", R"({"weight_map": []})",
        R"({"weight_map": {"a": 1}})", R"({"weight_map": {"a": {"b": "c"}}})",
        R"({"weight_map": {"a": ["b"]}})", R"({"weight_map": {"a": null}})",
        R"({"weight_map": {"a": "1"}, "weight_map": {"a": "1"}})"})
    expect_fault(index_of(text), FaultCode::kInvalid, {});
  expect_fault(index_of(R"({"weight_map": {"a": "1", "a": "2"}})"), FaultCode::kInvalid, {"'a'", "twice"});
  std::string many = R"({"weight_map": {)";
  for (int i = 0; i <= MOECACHED_MAX_FILES; ++i)
    many += (i == 0 ? "\"" : ", \"") + std::to_string(i) + "\": \"" + std::to_string(i) + "\"";
  expect_fault(index_of(many + "}}"), FaultCode::kLimit, {std::to_string(int{MOECACHED_MAX_FILES})});
  expect_fault(index_of(R"({"weight_map": {")" + std::string(256, 'x') + R"(": "1"}})"), FaultCode::kLimit,
               {"255"});
}

TEST(HfConfig, CountsAreFoundByAnyOfTheirNames) {
  auto qwen = config_of(R"({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8})");
  ASSERT_TRUE(qwen) << qwen.error().text;
  EXPECT_EQ(qwen->model_type, "qwen3_moe");
  EXPECT_EQ(qwen->n_experts, 128u);
  EXPECT_EQ(qwen->n_expert_used, 8u);
  auto mixtral = config_of(R"({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})");
  ASSERT_TRUE(mixtral);
  EXPECT_EQ(mixtral->n_experts, 8u);
  auto deepseek = config_of(
      R"({"model_type": "d", "n_routed_experts": 256, "num_experts_per_tok": 8, "num_experts": null})");
  ASSERT_TRUE(deepseek);
  EXPECT_EQ(deepseek->n_experts, 256u);
  auto nested =
      config_of(R"({"model_type": "v", "text_config": {"num_local_experts": 16, "num_experts_per_tok": 1}})");
  ASSERT_TRUE(nested) << nested.error().text;
  EXPECT_EQ(nested->n_experts, 16u);
  auto unsaid = config_of(R"({"model_type": "v", "num_experts_per_tok": 1})");
  ASSERT_TRUE(unsaid);
  EXPECT_EQ(unsaid->n_experts, 0u);
}

TEST(HfConfig, HostileOnesAreRefused) {
  for (const char* text :
       {"", "[]", "{", "7", R"({"num_experts_per_tok": 8})", R"({"model_type": 1, "num_experts_per_tok": 8})",
        R"({"model_type": "", "num_experts_per_tok": 8})", R"({"model_type": "x"})",
        R"({"model_type": "x", "text_config": 7})", R"({"model_type": "x", "num_experts_per_tok": 0})",
        R"({"model_type": "x", "num_experts_per_tok": -1})",
        R"({"model_type": "x", "num_experts_per_tok": 1.5})",
        R"({"model_type": "x", "num_experts_per_tok": "8"})",
        R"({"model_type": "x", "num_experts_per_tok": 4097})",
        R"({"model_type": "x", "num_experts_per_tok": 8, "num_experts": [8]})",
        R"({"model_type": "x", "num_experts_per_tok": 8, "num_experts": 18446744073709551615})"})
    expect_fault(config_of(text), FaultCode::kInvalid, {"config.json"});
  // No recursion, neither to read it nor to forget it.
  const std::string deep = std::string(400'000, '[') + std::string(400'000, ']');
  expect_fault(config_of(R"({"model_type": "x", "deep": )" + deep + "}"), FaultCode::kInvalid,
               {"is missing"});
  const UniqueFd large = memory_file(bytes_of("{}"));
  ASSERT_EQ(::ftruncate(large.get(), kConfigBytesMax + 1), 0);
  expect_fault(read_hf_config(large.get()), FaultCode::kLimit,
               {"config.json", std::to_string(kConfigBytesMax)});
}

}  // namespace
}  // namespace moecached::test
