#include "shim/ggml/gguf_index.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "tests/unit/shim/mini_host.h"

namespace moecached::shim {
namespace {

TEST(GgufIndex, KnowsExpertTensorsByTheirNames) {
  EXPECT_TRUE(is_expert_tensor("blk.0.ffn_gate_exps.weight"));
  EXPECT_TRUE(is_expert_tensor("blk.11.ffn_down_exps.bias"));
  EXPECT_TRUE(is_expert_tensor("blk.3.ffn_gate_up_exps.weight"));
  EXPECT_FALSE(is_expert_tensor("blk.0.ffn_gate_shexp.weight"));
  EXPECT_FALSE(is_expert_tensor("blk.0.ffn_gate_chexps.weight"));
  EXPECT_FALSE(is_expert_tensor("blk.0.ffn_gate_inp.weight"));
}

TEST(GgufIndex, LeavesOutExpertsAndKeepsHeaderAndGaps) {
  const GgufIndex index({{"a", {100, 50}},
                         {"blk.0.ffn_up_exps.weight", {150, 100}},
                         {"blk.0.ffn_gate_exps.weight", {250, 50}},
                         {"b", {320, 80}},
                         {"blk.1.ffn_up_exps.weight", {400, 100}}});
  EXPECT_EQ(index.ranges_without_experts(500), (std::vector<ByteRange>{{0, 150}, {300, 400}}));
  EXPECT_EQ(index.ranges_without_experts(600), (std::vector<ByteRange>{{0, 150}, {300, 400}, {500, 600}}));
  EXPECT_EQ(index.ranges_without_experts(200), (std::vector<ByteRange>{{0, 150}}));
}

TEST(GgufIndex, ReadsAgainWhenTheFileHasChanged) {
  testing::TemporaryFolder folder;
  const std::string path = folder.file("model.gguf");
  std::ofstream(path) << "GGUF....";
  testing::install_mini_host({{"first", 0, 8}});
  int fd = open(path.c_str(), O_RDONLY);
  ASSERT_NE(gguf_index_of(fd), nullptr);
  EXPECT_NE(gguf_index_of(fd)->find("first"), nullptr);
  close(fd);
  std::ofstream(path) << "GGUF.........";
  testing::install_mini_host({{"second", 0, 8}});
  fd = open(path.c_str(), O_RDONLY);
  EXPECT_EQ(gguf_index_of(fd)->find("first"), nullptr);
  EXPECT_NE(gguf_index_of(fd)->find("second"), nullptr);
  close(fd);
}

TEST(GgufIndex, IsNoIndexForOtherFilesAndPipes) {
  testing::TemporaryFolder folder;
  testing::install_mini_host({{"first", 0, 8}});
  std::ofstream(folder.file("text")) << "GGU";
  const int fd = open(folder.file("text").c_str(), O_RDONLY);
  EXPECT_EQ(gguf_index_of(fd), nullptr);
  close(fd);
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  EXPECT_EQ(gguf_index_of(pipe_fds[0]), nullptr);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

}  // namespace
}  // namespace moecached::shim
